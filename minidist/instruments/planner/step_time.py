"""How long a step takes, by what: computing, waiting in the pipeline, communication. Lesson:
mixed_parallelism."""

from dataclasses import dataclass

from minidist.collectives.cost import cost
from minidist.instruments.planner.device import Device
from minidist.instruments.planner.layout import Layout, Stage, stages
from minidist.instruments.planner.model_states import PRECISIONS, memory
from minidist.instruments.planner.peak import (
    kept_activations,
    layer_activations,
    logits,
)
from minidist.instruments.planner.transformer import Transformer

# Along data, of gradients, then of parameters. Stage 1 stands behind a DDP, as in the lesson `zero`
# and in torch. In Megatron it sends what stage 2 sends, and so it does in `step_time`.
COLLECTIVES: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {
    0: (("all_reduce",), ()),
    1: (("all_reduce",), ("all_gather",)),
    2: (("reduce_scatter",), ("all_gather",)),
    3: (("reduce_scatter",), ("all_gather", "all_gather")),  # for forward, and for backward
}


def traffic(
    parameters: float, world_size: int = 1, stage: int = 0, *, precision: str = "mixed"
) -> float:
    """Bytes that each rank sends in a step without accumulation. Lesson: zero.

    With ring collectives, Ψ parameters and N ranks: 2Ψ(N-1)/N elements in DDP and in stage 2, and
    3Ψ(N-1)/N in stages 1 and 3. ZeRO (arXiv 1910.02054), section 7, has them without (N-1)/N, and
    has 2Ψ for stage 1: see COLLECTIVES. Raises ValueError as `memory` does.
    """
    memory(parameters, world_size, stage, precision=precision)  # or ValueError
    calls = sum(_along_data(parameters, stage, precision), [])
    return sum(cost(name, "ring", world_size, nbytes).nbytes for name, nbytes in calls)


def _along_data(parameters: float, stage: int, precision: str) -> list[list[tuple[str, float]]]:
    """Collectives of gradients, and of parameters: their names and bytes."""
    size = PRECISIONS[precision]
    gathered = min(size.compute, size.parameter) if stage == 3 else size.parameter
    return [
        [(name, each * parameters) for name in names]
        for names, each in zip(COLLECTIVES[stage], (size.gradient, gathered), strict=True)
    ]


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. `bubble`: waiting for the pipeline to fill and to drain. `tensor`,
    `context`, `pipeline`, `data`: what travels along each axis; of the last, `hidden` behind
    computing. `optimizer`: reading and writing what it updates."""

    compute: float
    bubble: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    pipeline: float = 0.0
    data: float = 0.0
    hidden: float = 0.0
    optimizer: float = 0.0

    @property
    def communication(self) -> float:
        """Seconds in which a rank only waits for messages."""
        return self.tensor + self.context + self.pipeline + self.data - self.hidden

    @property
    def total(self) -> float:
        return self.compute + self.bubble + self.optimizer + self.communication


def step_time(
    model: Transformer,
    layout: Layout,
    device: Device,
    precision: str = "mixed",
    optimizer: str = "adam",
) -> StepTime:
    """Predict a training step, of the slowest rank. Lesson: mixed_parallelism.

    - Backward computes twice what forward does (Kaplan et al., arXiv 2001.08361, section 2.1).
      Flash attention leaves out what the causal mask hides, and has five products in backward where
      forward has two (arXiv 2307.08691, section 3.1).
    - The bubble is (p - 1)/v micro-batches of a stage (Narayanan et al., arXiv 2104.04473, section
      2.2), here of stages that need not be equal.
    - Tensor: four all_reduces of the activations a layer and micro-batch, which nothing hides; with
      sequence parallel the same bytes (arXiv 2205.05198, section 4.2.2).
    - Context: keys and values are gathered in forward and in backward, and their gradients reduced
      (arXiv 2407.21783, section 3.3.2). Nothing hides them.
    - Data: a message a unit, which is a layer or an end. Gradients travel behind the last backward
      pass; in stages 2 and 3 behind every one, since no rank can keep them whole. Parameters are
      gathered behind the next forward pass: in stage 1 as with Megatron's --overlap-param-gather,
      in stage 3 a unit ahead, there again behind backward. Nothing hides the first gather and the
      last reduction. With copies of the shards, gradients are then averaged over these.
    - Pipeline: each of the tensor ranks sends its part (arXiv 2104.04473, section 4.1).
    - Optimizer: the bytes of `Precision.touched`, at the device's bandwidth.

    Raises ValueError as `peak` does.
    """
    held = stages(model, layout)
    parts = [_micro_batch(model, layout, device, stage, precision) for stage in held]
    slowest = max(parts, key=sum)
    m, v = layout.micro_batches, layout.chunks
    compute, tensor, context = (m * each for each in slowest)
    activation = layout.micro_batch * model.length / layout.context * model.width
    sent = activation * PRECISIONS[precision].compute / layout.tensor
    hops = 2 * v * m if layout.pipeline > 1 else 0  # forward and back, between neighbours

    largest = max(held, key=lambda stage: stage.parameters(model, layout.tensor))
    data, hidden = _data(model, layout, device, largest, precision, slowest[0])
    own = largest.parameters(model, layout.tensor, layout.rows_in)
    updated = own / (layout.shards if layout.stage else 1)
    return StepTime(
        compute=compute,
        bubble=(sum(map(sum, parts)) - sum(slowest)) / v,
        tensor=tensor,
        context=context,
        pipeline=hops * device.send(sent, layout.tensor * layout.context, layout.pipeline),
        data=data,
        hidden=hidden,
        optimizer=updated * PRECISIONS[precision].touched(optimizer) / device.bandwidth,
    )


def mfu(model: Transformer, layout: Layout, device: Device, seconds: float) -> float:
    """Model FLOPs utilisation of a step of `seconds`: of the GPUs' peak in 16 bits, the part that
    the model's own operations use, which are `Transformer.flops` a token.

    PaLM's definition (arXiv 2204.02311, appendix B): 6 operations for each weight that multiplies
    a token, attention without its causal half taken off, and nothing for what is computed again. A
    table of embeddings that is only looked up multiplies nothing. Sources that count it say more:
    torchtitan's page of 2024 says 58.2 % where this says 55.2 %. Lessons: reading_a_step,
    scaling_out.
    """
    work = layout.sequences * model.length * model.flops
    return work / (seconds * layout.world_size * device.flops)


def _data(
    model: Transformer, layout: Layout, device: Device, own: Stage, precision: str, compute: float
) -> tuple[float, float]:
    """Seconds of messages along data, and of these, behind computing: `compute` seconds of a
    micro-batch, a third of it forward."""
    stage, shards, stride = layout.stage, layout.shards, layout.stride

    def seconds(size: float) -> list[float]:
        """Of a unit's gradients, and of gathering its parameters once."""
        calls = _along_data(size, 2 if stage in (1, 3) else stage, precision)
        if stage == 3:
            calls[1] = _along_data(size, 3, precision)[1][:1]
        found = [
            sum(device.collective(name, shards, n, stride) for name, n in each) for each in calls
        ]
        if stage == 3 and layout.replicate > 1:
            part = PRECISIONS[precision].gradient * size / shards
            found[0] += device.collective("all_reduce", layout.replicate, part, stride * shards)
        return found

    units = own.units(model, layout.tensor, layout.rows_in)
    each = [(seconds(size), times) for size, times in units]
    gradients, once = (sum(times * both[i] for both, times in each) for i in (0, 1))
    last, first = each[0][0]  # the first unit's gradients come last, its parameters first
    forward, backward = compute / 3, compute * 2 / 3
    ahead = min(once - first, forward) if stage in (1, 3) else 0.0
    if stage == 2:
        m = layout.micro_batches
        return m * gradients + once, m * min(gradients - last, backward)
    if stage < 3 or layout.keeps_units:
        return gradients + once, min(gradients - last, backward) + ahead
    again = once if layout.reshard_after_forward else 0.0
    behind = ahead + min(again + gradients - last, backward)
    return layout.micro_batches * (once + again + gradients), layout.micro_batches * behind


def _micro_batch(
    model: Transformer, layout: Layout, device: Device, stage: Stage, precision: str
) -> tuple[float, float, float]:
    """Seconds of a stage, forward and backward: computing, and messages along tensor and along
    context."""
    t, c, again = layout.tensor, layout.context, layout.recompute
    tokens, flash = layout.micro_batch * model.length / c, not layout.stored_attention
    attention = model.attention_flops / t / (2 if flash else 1)  # the causal half
    linear = (model.layer_flops - model.attention_flops) / t
    layer = [3 * linear, (3.5 if flash else 3) * attention]
    if again == "layers":
        layer = [layer[0] + linear, layer[1] + attention]
    if again == "attention":
        layer[1] += attention
    if again == "operations":
        layer[0] += sum(flops for _, flops in model.products(t)[:-1][1::2])
    faster = device.float8 if PRECISIONS[precision].float8 else 1
    flops = stage.layers * layer[0] / faster
    flops += 3 * model.head_flops / t if stage.last else 0
    # As many operations at the usual speed would take as long.
    slower = device.utilisation / device.attention if flash and device.attention else 1
    scores = stage.layers * layer[1] * slower
    whole = layer_activations(model, layout, precision)
    moved = 4 * whole + 2 * (whole - kept_activations(model, layout, precision))
    ends = 2 * logits(model, layout, precision) if stage.last else 0
    computing = device.seconds(tokens * (flops + scores))
    computing += (stage.layers * moved + ends) / device.bandwidth
    size, passes = PRECISIONS[precision].compute, 3 if again == "layers" else 2
    reduced = device.collective("all_reduce", t, tokens * model.width * size)  # two a pass
    keys = 2 * layout.micro_batch * model.length * model.kv_width(t) * size  # and values
    gathered = device.collective("all_gather", c, keys, t)  # each pass; their gradients as well
    return computing, stage.layers * 2 * passes * reduced, stage.layers * (passes + 1) * gathered
