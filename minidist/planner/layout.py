"""How a training is laid out on ranks, and which layers each pipeline stage has. Lesson:
mixed_parallelism."""

from dataclasses import dataclass, fields
from functools import cache
from typing import NamedTuple

from minidist.pipeline.balance import balance
from minidist.planner.model_states import STAGES, require_one_of, require_whole
from minidist.planner.transformer import Transformer

RECOMPUTE = "nothing", "attention", "layers"


@dataclass(frozen=True)
class Layout:
    """A mesh of `world_size` ranks, from the innermost axis: tensor, pipeline, data; and a step.

    stage: of ZeRO, along data (see `memory`).
    micro_batch: sequences that go through the model at once.
    micro_batches: how many of these a replica has in a step: accumulated, or in the pipeline, 1F1B.
    chunks: model chunks of a rank, in the interleaved 1F1B; 1 is the usual one.
    sequence_parallel: norms and dropouts are shared out along the sequence.
    stored_attention: whether attention stores its (s, s) scores; flash attention does not.
    recompute: "attention" (its scores alone, "selective") or "layers" (all but their inputs,
        "full").

    Raises ValueError for numbers that do not fit each other.
    """

    world_size: int = 1
    tensor: int = 1
    pipeline: int = 1
    stage: int = 0
    micro_batch: int = 1
    micro_batches: int = 1
    chunks: int = 1
    sequence_parallel: bool = False
    stored_attention: bool = False
    recompute: str = "nothing"

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.type is int and each.name != "stage":
                require_whole(each.name, getattr(self, each.name))
        require_one_of("stage", self.stage, STAGES)
        require_one_of("recompute", self.recompute, RECOMPUTE)
        if self.world_size % (self.tensor * self.pipeline):
            raise ValueError(
                f"{self.world_size} ranks are no multiple of tensor {self.tensor} × pipeline "
                f"{self.pipeline}"
            )

    @property
    def data(self) -> int:
        """How many replicas there are."""
        return self.world_size // (self.tensor * self.pipeline)

    @property
    def sequences(self) -> int:
        """Of a step: the global batch."""
        return self.data * self.micro_batch * self.micro_batches

    def in_flight(self, stage: int) -> float:
        """Micro-batches whose activations a pipeline stage holds at once: min(m, p - stage) in 1F1B
        (arXiv 2104.04473, section 2.2); for the first of v chunks, p (1 + (p - 1) / pv) (arXiv
        2205.05198, section 4.2.3)."""
        p, v, ahead = self.pipeline, self.chunks, self.pipeline - stage - 1
        most = ahead + 1 if v == 1 else (2 * ahead + (v - 1) * p + 1) / v
        return min(self.micro_batches, most)


class Stage(NamedTuple):
    """Of a pipeline: its number, how many layers it has, and whether it has the two ends."""

    number: int
    layers: int
    first: bool
    last: bool

    def parameters(self, model: Transformer, tensor: int = 1) -> int:
        """On one of `tensor` ranks. Tied weights are on both ends."""
        own = self.layers * model.layer_parameters(tensor)
        own += model.embedding_parameters(tensor) if self.first else 0
        return own + (model.head_parameters(tensor, model.tied and self.first) if self.last else 0)


def stages(model: Transformer, layout: Layout) -> list[Stage]:
    """Layers and head, shared out so that the slowest stage is as fast as can be: the last one
    often gets fewer layers. Lesson: layer_splitting.

    Raises ValueError if the model cannot be cut into so many pieces.
    """
    p, t = layout.pipeline, layout.tensor
    if model.layers < p * layout.chunks:
        raise ValueError(f"{model.layers} layers are too few for {p} stages of {layout.chunks}")
    kv = model.kv_heads or model.heads
    if model.heads % t or model.mlp_width % t or (kv % t and t % kv):
        raise ValueError(f"{model.heads} heads, {kv} of them of keys, cannot be cut by tensor {t}")
    counts = _layers(model.layers, model.layer_flops, model.head_flops, p)
    return [Stage(i, count, i == 0, i == p - 1) for i, count in enumerate(counts)]


@cache
def _layers(layers: int, layer: int, head: int, pieces: int) -> list[int]:
    return balance([layer] * (layers - 1) + [layer + head], pieces)
