"""How long a step takes, by what: computing, waiting in the pipeline, communication. Lessons:
scaling_out, experts."""

from dataclasses import dataclass, replace
from math import comb

from minidist.collectives.cost import cost
from minidist.instruments.planner.device import Device
from minidist.instruments.planner.layout import Layout, Stage, stages
from minidist.instruments.planner.model_states import PRECISIONS, memory
from minidist.instruments.planner.peak import (
    copies_of_keys,
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
    computing; of a ring along context, only what attention does not hide. `optimizer`: reading and
    writing what it updates. `experts`: all_to_alls of tokens."""

    compute: float
    bubble: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    pipeline: float = 0.0
    data: float = 0.0
    hidden: float = 0.0
    optimizer: float = 0.0
    experts: float = 0.0

    @property
    def communication(self) -> float:
        """Seconds in which a rank only waits for messages."""
        return self.tensor + self.context + self.experts + self.pipeline + self.data - self.hidden

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
    """Predict a training step, of the slowest rank. Lesson: scaling_out.

    - Backward computes twice what forward does (Kaplan et al., arXiv 2001.08361, section 2.1).
      Flash attention leaves out what the causal mask hides, and has five products in backward where
      forward has two (arXiv 2307.08691, section 3.1).
    - The bubble is (p - 1)/v micro-batches of a stage (Narayanan et al., arXiv 2104.04473, section
      2.2), here of stages that need not be equal.
    - Tensor: four all_reduces of the activations a layer and micro-batch, which nothing hides; with
      sequence parallel the same bytes (arXiv 2205.05198, section 4.2.2).
    - Context: keys and values are gathered in forward and in backward, and their gradients reduced
      (arXiv 2407.21783, section 3.3.2). Nothing hides them, nor the all_to_alls of Ulysses. A step
      of the ring takes as long as its block or its messages. Of a contiguous cut, the last rank.
    - Data: a message a unit, which is a layer or an end. Gradients travel behind the last backward
      pass; in stages 2 and 3 behind every one, since no rank can keep them whole. Parameters are
      gathered behind the next forward pass: in stage 1 as with Megatron's --overlap-param-gather,
      in stage 3 a unit ahead, there again behind backward. Nothing hides the first gather and the
      last reduction. With copies of the shards, gradients are then averaged over these.
    - Experts: the fullest rank of `imbalance` decides. Its rows go to the experts and come back, in
      forward and in backward, and nothing hides that. Along data, those of a layer are a unit of
      their own, among the ranks that have the same ones.
    - Pipeline: each of the tensor ranks sends its part (arXiv 2104.04473, section 4.1).
    - Optimizer: the bytes of `Precision.touched`, at the device's bandwidth.

    Raises ValueError as `peak` does.
    """
    held = stages(model, layout)
    parts = [_micro_batch(model, layout, device, stage, precision) for stage in held]
    slowest = max(parts, key=sum)
    m, v = layout.micro_batches, layout.chunks
    compute, tensor, context, experts = (m * each for each in slowest)
    activation = layout.micro_batch * model.length / layout.context * model.width
    sent = activation * PRECISIONS[precision].compute / layout.tensor
    hops = 2 * v * m if layout.pipeline > 1 else 0  # forward and back, between neighbours

    largest = max(held, key=lambda s: s.parameters(model, layout.tensor) + s.routed(model, layout))
    data, hidden = _data(model, layout, device, largest, precision, slowest[0])
    held_by_all = largest.parameters(model, layout.tensor, layout.rows_in)
    own = held_by_all / (layout.shards if layout.stage else 1)
    own += largest.routed(model, layout) / (layout.expert_shards if layout.stage else 1)
    outermost = layout.world_size // layout.pipeline
    apart = outermost if layout.experts > 1 else layout.tensor * layout.context
    return StepTime(
        compute=compute,
        bubble=(sum(map(sum, parts)) - sum(slowest)) / v,
        tensor=tensor,
        context=context,
        pipeline=hops * device.send(sent, apart, layout.pipeline),
        data=data,
        hidden=hidden,
        optimizer=own * PRECISIONS[precision].touched(optimizer) / device.bandwidth,
        experts=experts,
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
    stage = layout.stage

    def seconds(size: float, shards: int, stride: int) -> list[float]:
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
    each = [(seconds(size, layout.shards, layout.stride), times) for size, times in units]
    if own.sparse:
        routed = model.expert_parameters() / layout.experts
        ranks = layout.expert_shards, layout.stride // layout.tensor * layout.experts
        each += [(seconds(routed, *ranks), own.sparse)]
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
) -> tuple[float, float, float, float]:
    """Seconds of a stage, forward and backward: computing, and messages along tensor, along context
    and to experts."""
    t, c, again = layout.tensor, layout.context, layout.recompute
    tokens, flash = layout.micro_batch * model.length / c, not layout.stored_attention
    attention = model.attention_flops / t / (2 if flash else 1)  # the causal half
    if flash and layout.context_cut == "contiguous" and layout.context_attention != "ulysses":
        attention *= 2 - 1 / c
    linear = (model.layer_flops - model.attention_flops) / t
    backward = 2.5 if flash else 2
    layer = [3 * linear, (1 + backward) * attention]
    if again == "layers":
        layer = [layer[0] + linear, layer[1] + attention]
    if again == "attention":
        layer[1] += attention
    if again == "operations":
        layer[0] += sum(flops for _, flops in model.products(t)[:-1][1::2])
    faster = device.float8 if PRECISIONS[precision].float8 else 1
    flops = stage.layers * layer[0] / faster
    more = (layout.imbalance - 1) * 2 * model.expert_parameters(model.active) / t
    times = 6 if again == "layers" else 4  # messages, forward and backward
    flops += stage.sparse * (times // 2 + 1) * more / faster
    flops += 3 * model.head_flops / t if stage.last else 0
    # As many operations at the usual speed would take as long.
    slower = device.utilisation / device.attention if flash and device.attention else 1
    scores = stage.layers * layer[1] * slower
    size = PRECISIONS[precision].compute
    # No tensor rank has a part of an expert.
    all_reduces = times * (stage.layers - (0 if model.shared else stage.sparse / 2))
    rows = layout.imbalance * tokens / t * sent_rows(model, layout, device.per_node)
    scored = device.seconds(tokens * attention * slower)
    context = _context(model, layout, device, size, (scored, backward * scored))
    whole = layer_activations(model, layout, precision)
    moved = 4 * whole + 2 * (whole - kept_activations(model, layout, precision))
    ends = 2 * logits(model, replace(layout, loss_chunks=1), precision) if stage.last else 0
    return (
        device.seconds(tokens * (flops + scores))
        + (stage.layers * moved + ends) / device.bandwidth,
        all_reduces * device.collective("all_reduce", t, tokens * model.width * size),
        stage.layers * context,
        times * stage.sparse * device.exchange(layout.experts, rows * model.width * size),
    )


def sent_rows(model: Transformer, layout: Layout, per_node: int) -> float:
    """Of a token to its experts: k, or how many nodes or ranks are `touched`."""
    if not (layout.once and model.experts):
        return model.active
    if layout.experts <= per_node:
        return touched(model.experts, model.active, layout.experts)
    return touched(model.experts, model.active, layout.experts // per_node, model.of_nodes)


def touched(experts: int, active: int, parts: int, limit: int | None = None) -> float:
    """How many of `parts` ranks or nodes, which share the experts evenly, have some of a token's k
    on average, if every choice is as likely: M (1 - C(E - E/M, k) / C(E, k)). With a `limit`, at
    most that, which DeepSeek-V3's routing nearly reaches. Lesson: experts."""
    none = comb(experts - experts // parts, active) / comb(experts, active)
    return min(parts * (1 - none), limit or parts)


def _context(
    model: Transformer, layout: Layout, device: Device, size: int, scores: tuple[float, float]
) -> float:
    """Seconds that a layer of a micro-batch waits for messages along context. `scores`: of its
    attention, forward and backward."""
    t, c, again = layout.tensor, layout.context, layout.recompute == "layers"
    keys = 2 * layout.micro_batch * model.length * model.kv_width(t) * size  # and values
    if layout.context_attention == "ulysses":  # queries and outputs, keys and values
        sent = keys * copies_of_keys(model, layout)
        sent += 2 * layout.micro_batch * model.length * model.attention_width // t * size
        return (3 if again else 2) * device.exchange(c, sent / c, t)
    if layout.context_attention != "ring":
        gathers = (2 if layout.context_attention == "gathered once" else 3) + again
        return gathers * device.collective("all_gather", c, keys, t)
    # The first block is the triangle of a rank's own tokens; of a contiguous cut, half a block.
    first = 1 / (2 * c - 1) if layout.context_cut == "contiguous" else 1 / c
    blocks = [first, *[(1 - first) / (c - 1)] * (c - 1), 0] if c > 1 else []
    message = device.send(keys / c, t, c)

    def waits(messages: list[int], seconds: float) -> float:
        pairs = zip(messages, blocks, strict=False)
        return sum(max(0.0, n * message - block * seconds) for n, block in pairs)

    forward = waits([1] * (c - 1), scores[0])
    # Gradients follow one block behind.
    backward = waits([(step < c - 1) + (step > 1) for step in range(c + 1)], scores[1])
    return (1 + again) * forward + backward
