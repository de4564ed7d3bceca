"""How a training is laid out on ranks, and which layers each pipeline stage has. Lessons:
scaling_out, experts."""

from dataclasses import dataclass, fields
from functools import cache
from typing import NamedTuple

from minidist.instruments.planner.model_states import STAGES, require_one_of, require_whole
from minidist.instruments.planner.transformer import Transformer
from minidist.pipeline.equal_stages import balance

RECOMPUTE = "nothing", "elementwise", "attention", "operations", "layers"
CONTEXT_ATTENTION = "gathered", "gathered once", "ring", "ulysses"
CONTEXT_CUT = "zigzag", "contiguous"


@dataclass(frozen=True)
class Layout:
    """A mesh of `world_size` ranks, from the innermost axis: tensor, context, pipeline, data, as in
    Llama 3 (arXiv 2407.21783, section 3.3.2); and a step.

    stage: of ZeRO, along data and context (see `memory`).
    micro_batch: sequences that go through the model at once.
    micro_batches: how many of these a replica has in a step: accumulated, or in the pipeline, 1F1B.
    chunks: model chunks of a rank, in the interleaved 1F1B; 1 is the usual one.
    sequence_parallel: norms and dropouts are shared out along the sequence.
    stored_attention: whether attention stores its (s, s) scores; flash attention does not.
    recompute: what backward computes again. "elementwise": results of norms and of the MLP's
        activation function, as DeepSeek-V3 does (arXiv 2412.19437, sections 3.2.3 and 3.3.2).
        "attention": its stored scores, Megatron's "selective". "operations": torchtitan's
        "selective", all but attention and every second matrix product. "layers": "full", all but
        their inputs.
    context: ranks that share a sequence.
    context_attention: how these see each other's keys and values. "gathered": before attention, and
        in backward again (Llama 3). "gathered once": they stay from forward to backward, as by
        "gathered" of ContextParallel. "ring": block by block, beside computing. "ulysses":
        all_to_alls, to all tokens of some heads.
    context_cut: "zigzag": each rank has as much of causal attention to compute. "contiguous": the
        last of N has 2 - 1/N of the mean, but in Ulysses. Lesson: long_sequences.
    replicate: of ZeRO-3, how many copies of the shards there are: hybrid sharding.
    reshard_after_forward: of ZeRO-3. Without it, parameters stay from forward to backward; with
        several micro-batches, as in torch's pipelines, they and whole gradients stay for all.
    loss_chunks: in so many pieces the logits are made, and their gradients.
    experts: ranks that share a layer's experts, of those along tensor, context and data, which are
        neighbours then: pipeline is the outermost axis, as in Megatron. No expert is cut: each
        tensor rank sends its part of the tokens. Nothing is dropped. Lesson: experts.
    imbalance: rows that the fullest of these ranks gets, over the mean: 1 to `experts`.
    once: a token travels once to each node that has some of its experts, or on one node to each
        rank, as by DeepEP. Otherwise once for each expert.

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
    context: int = 1
    context_attention: str = "gathered"
    context_cut: str = "zigzag"
    replicate: int = 1
    reshard_after_forward: bool = True
    loss_chunks: int = 1
    experts: int = 1
    imbalance: float = 1.0
    once: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.type is int and each.name != "stage":
                require_whole(each.name, getattr(self, each.name))
        require_one_of("stage", self.stage, STAGES)
        require_one_of("recompute", self.recompute, RECOMPUTE)
        require_one_of("context_attention", self.context_attention, CONTEXT_ATTENTION)
        require_one_of("context_cut", self.context_cut, CONTEXT_CUT)
        if self.world_size % (self.tensor * self.pipeline * self.context):
            raise ValueError(
                f"{self.world_size} ranks are no multiple of tensor {self.tensor} × pipeline "
                f"{self.pipeline} × context {self.context}"
            )
        if self.data * self.context % self.replicate:
            raise ValueError(
                f"{self.data * self.context} ranks cannot hold {self.replicate} copies of shards"
            )
        ranks = self.shards * self.tensor
        if ranks % self.experts:
            raise ValueError(f"{ranks} ranks are no multiple of {self.experts} that share experts")
        if not 1 <= self.imbalance <= self.experts:
            raise ValueError(f"imbalance is from 1 to {self.experts}, not {self.imbalance:g}")
        if self.recompute == "attention" and not self.stored_attention:
            raise ValueError("flash attention stores no scores: there is nothing to compute again")

    @property
    def data(self) -> int:
        """How many replicas there are."""
        return self.world_size // (self.tensor * self.pipeline * self.context)

    @property
    def shards(self) -> int:
        """Ranks among which ZeRO shares out."""
        return self.data * self.context // (self.replicate if self.stage == 3 else 1)

    @property
    def expert_shards(self) -> int:
        """Ranks among which ZeRO shares out an expert: without ZeRO each has a copy of it."""
        return self.shards * self.tensor // self.experts

    @property
    def stride(self) -> int:
        """From a rank to the next along context and data."""
        return self.tensor * (1 if self.experts > 1 else self.pipeline)

    @property
    def rows_in(self) -> int:
        """A parameter's rows are padded to a multiple of this: in ZeRO-3, whose shards are rows."""
        return self.shards if self.stage == 3 else 1

    @property
    def sequences(self) -> int:
        """Of a step: the global batch."""
        return self.data * self.micro_batch * self.micro_batches

    @property
    def keeps_units(self) -> bool:
        """Whether whole parameters and gradients stay for all micro-batches."""
        return self.stage == 3 and not self.reshard_after_forward and self.micro_batches > 1

    def in_flight(self, stage: int) -> float:
        """Micro-batches whose activations a pipeline stage holds at once: min(m, p - stage) in 1F1B
        (arXiv 2104.04473, section 2.2); for the first of v chunks, p (1 + (p - 1) / pv) (arXiv
        2205.05198, section 4.2.3)."""
        p, v, ahead = self.pipeline, self.chunks, self.pipeline - stage - 1
        most = ahead + 1 if v == 1 else (2 * ahead + (v - 1) * p + 1) / v
        return min(self.micro_batches, most)


class Stage(NamedTuple):
    """Of a pipeline: its number, how many layers it has, whether it has the two ends, and how many
    layers with experts."""

    number: int
    layers: int
    first: bool
    last: bool
    sparse: int = 0

    def parameters(self, model: Transformer, tensor: int = 1, shards: int = 1) -> int:
        """On one of `tensor` ranks, without experts; of ZeRO-3 with padding. Tied weights are on
        both ends."""
        return sum(size * times for size, times in self.units(model, tensor, shards))

    def routed(self, model: Transformer, layout: Layout) -> int:
        """Parameters of a rank's experts."""
        return self.sparse * model.expert_parameters() // layout.experts

    def units(self, model: Transformer, tensor: int = 1, shards: int = 1) -> list[tuple[int, int]]:
        """What travels as one message along data: its parameters, and how many such there are. The
        embedding, the layers, the head. shards: with the padding of ZeRO-3."""
        head = model.head_parameters(tensor, model.tied and self.first, shards)
        layer, dense = (model.layer_parameters(tensor, shards, each) for each in (False, True))
        every = [(model.embedding_parameters(tensor, shards), int(self.first))]
        every += [(layer, self.sparse), (dense, self.layers - self.sparse), (head, int(self.last))]
        return [(size, times) for size, times in every if times]


def stages(model: Transformer, layout: Layout) -> list[Stage]:
    """Layers and head, shared out so that the slowest stage is as fast as can be: the last one
    often gets fewer layers. Lesson: scaling_out.

    Raises ValueError if the model cannot be cut into so many pieces.
    """
    p, t = layout.pipeline, layout.tensor
    if model.layers + (2 if layout.chunks > 1 else 0) < p * layout.chunks:  # ends without layers
        raise ValueError(f"{model.layers} layers are too few for {p} stages of {layout.chunks}")
    if model.length % layout.context:
        raise ValueError(f"{model.length} tokens cannot be shared by {layout.context} ranks")
    kv = model.kv_heads or model.heads
    if (model.experts or 1) % layout.experts:
        raise ValueError(f"{layout.experts} ranks cannot share {model.experts} experts")
    if (model.experts or model.attention) and layout.recompute == "operations":
        raise ValueError("recompute 'operations' is planned of dense layers, as of Llama 3")
    if model.heads % t or model.mlp_width % t or (kv % t and t % kv):
        raise ValueError(f"{model.heads} heads, {kv} of them of keys, cannot be cut by tensor {t}")
    heads, own, c = model.heads // t, model.kv_heads_of(t), layout.context
    if layout.context_attention == "ulysses" and (heads % c or (own % c and c % own)):
        raise ValueError(f"{c} ranks cannot share {heads} heads, {own} of them of keys: Ulysses")
    counts = _layers(model.layers, model.layer_flops, model.head_flops, p)
    dense = model.layers - model.sparse_layers
    sparse = [max(0, min(count, sum(counts[: i + 1]) - dense)) for i, count in enumerate(counts)]
    return [Stage(i, n, i == 0, i == p - 1, sparse[i]) for i, n in enumerate(counts)]


@cache
def _layers(layers: int, layer: int, head: int, pieces: int) -> list[int]:
    return balance([layer] * (layers - 1) + [layer + head], pieces)
