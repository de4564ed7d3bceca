"""How long a step takes, by what: computing, waiting in the pipeline, communication. Lesson:
mixed_parallelism."""

from dataclasses import dataclass

from minidist.collectives.cost import cost
from minidist.planner.device import Device
from minidist.planner.layout import Layout, Stage, stages
from minidist.planner.model_states import PRECISIONS, memory
from minidist.planner.transformer import Transformer

# Along data, of gradients, then of parameters. Stage 1 stands behind a DDP, as in the lesson `zero`
# and in torch; Megatron sends for it what stage 2 sends.
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
    `pipeline`, `data`: what travels along each axis; of the last, `hidden` behind computing. The
    optimizer's own work is left out."""

    compute: float
    bubble: float = 0.0
    tensor: float = 0.0
    pipeline: float = 0.0
    data: float = 0.0
    hidden: float = 0.0

    @property
    def communication(self) -> float:
        """Seconds in which a rank only waits for messages."""
        return self.tensor + self.pipeline + self.data - self.hidden

    @property
    def total(self) -> float:
        return self.compute + self.bubble + self.communication


def step_time(
    model: Transformer, layout: Layout, device: Device, precision: str = "mixed"
) -> StepTime:
    """Predict a training step, of the slowest rank. Lesson: mixed_parallelism.

    - Backward computes twice what forward does (Kaplan et al., arXiv 2001.08361, section 2.1).
    - The bubble is (p - 1)/v micro-batches of a stage (Narayanan et al., arXiv 2104.04473, section
      2.2), here of stages that need not be equal.
    - Tensor: four all_reduces of the activations a layer and micro-batch, which nothing hides; with
      sequence parallel the same bytes (arXiv 2205.05198, section 4.2.2).
    - Data: gradients travel behind the last backward pass; in stages 2 and 3 behind every one,
      since no rank can keep them whole. In stage 3 all is prefetched.

    Raises ValueError as `peak` does.
    """
    held = stages(model, layout)
    parts = [_micro_batch(model, layout, device, stage, precision) for stage in held]
    slowest = max(parts, key=sum)
    m, v, zero = layout.micro_batches, layout.chunks, layout.stage
    compute, tensor = m * slowest[0], m * slowest[1]
    activation = layout.micro_batch * model.length * model.width * PRECISIONS[precision].compute
    sent = activation / (layout.tensor if layout.sequence_parallel else 1)
    hops = 2 * v * m if layout.pipeline > 1 else 0  # forward and back, between neighbours

    own = max(stage.parameters(model, layout.tensor) for stage in held)
    stride = layout.tensor * layout.pipeline
    gradients, parameters = (
        sum(device.ring(name, layout.data, nbytes, stride) for name, nbytes in calls)
        for calls in _along_data(own, 2 if zero == 1 else zero, precision)
    )
    gradients *= m if zero >= 2 else 1
    parameters *= m if zero == 3 else 1
    backward = compute * 2 / 3 / (1 if zero == 2 else m)
    return StepTime(
        compute=compute,
        bubble=(sum(map(sum, parts)) - sum(slowest)) / v,
        tensor=tensor,
        pipeline=hops * device.send(sent, layout.tensor, layout.pipeline),
        data=gradients + parameters,
        hidden=min(gradients + parameters, compute) if zero == 3 else min(gradients, backward),
    )


def _micro_batch(
    model: Transformer, layout: Layout, device: Device, stage: Stage, precision: str
) -> tuple[float, float]:
    """Seconds of a stage, forward and backward: computing, and in all_reduces along tensor."""
    t, tokens, again = layout.tensor, layout.micro_batch * model.length, layout.recompute
    layer = 3 * model.layer_flops
    if again == "layers":
        layer += model.layer_flops
    if again == "attention" and layout.stored_attention:
        layer += model.attention_flops
    flops = stage.layers * layer + (3 * model.head_flops if stage.last else 0)
    activation = tokens * model.width * PRECISIONS[precision].compute
    all_reduces = stage.layers * (6 if again == "layers" else 4)
    return (
        device.seconds(tokens * flops / t),
        all_reduces * device.ring("all_reduce", t, activation),
    )
