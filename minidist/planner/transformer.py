"""The shape of a transformer: its parameters, and the operations of its forward pass. Models with
published shapes are in MODELS. Lesson: zero."""

import re
from dataclasses import dataclass, fields
from typing import Any

from minidist.planner.model_states import require_whole


@dataclass(frozen=True)
class Transformer:
    """A decoder of `layers` layers, `width` wide (h), with sequences of `length` tokens (s). It is
    dense: a mixture of experts, of whose parameters a token uses a part, is not planned here.

    Like GPT: biases, layer norms, learned positions, an MLP of two matrices. With `llama`: no
    biases, RMS norms, rotary positions, a gated MLP of three matrices.

    kv_heads: of keys and values, for grouped queries; None means `heads`.
    hidden: how wide the MLP is; None means 4h.
    tied: the head's weights are the embedding's.
    dropout: behind the attention scores, the attention, and the MLP; it only costs memory here.

    Raises ValueError for a number that is no whole one from 1 on, and for heads that do not divide.
    """

    layers: int
    width: int
    heads: int
    length: int = 2048
    vocabulary: int = 51200
    kv_heads: int | None = None
    hidden: int | None = None
    llama: bool = False
    tied: bool = True
    dropout: bool = False

    def __post_init__(self) -> None:
        for name, number in [(each.name, getattr(self, each.name)) for each in fields(self)[:7]]:
            if number is not None:
                require_whole(name, number)
        if self.width % self.heads:
            raise ValueError(f"a width of {self.width} cannot be shared by {self.heads} heads")
        if self.heads % (self.kv_heads or 1):
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads")

    def kv_width(self, tensor: int = 1) -> int:
        """How wide the keys are, on one of `tensor` ranks. Each has one head at least."""
        return self.width // self.heads * self.kv_heads_of(tensor)

    def kv_heads_of(self, tensor: int = 1) -> int:
        return max(1, (self.kv_heads or self.heads) // tensor)

    @property
    def mlp_width(self) -> int:
        return self.hidden or 4 * self.width

    def products(self, tensor: int = 1) -> list[tuple[int, int]]:
        """A layer's matrix products in the order of forward, on one of `tensor` ranks: how wide the
        result is, and operations a token. Queries, keys, values, output; (gate,) up, down."""
        h, kv = self.width, self.kv_width(tensor)
        own, f = h // tensor, self.mlp_width // tensor
        up = [(f, f)] * (2 if self.llama else 1)
        sizes = [(own, own), (kv, kv), (kv, kv), (h, own), *up, (h, f)]
        return [(wide, 2 * h * cut) for wide, cut in sizes]

    def layer_parameters(self, tensor: int = 1, shards: int = 1) -> int:
        """Of one layer, on one of `tensor` ranks: qkv and the MLP's first matrices are cut by
        columns, the others by rows (arXiv 1909.08053, section 3). Lesson: feature_splitting.

        shards: each of so many ranks gets as many rows of a parameter, some of them padding, as in
        ZeRO-3. Queries, keys and values are one matrix, and so are gate and up."""
        h, f, own = self.width, self.mlp_width // tensor, self.width // tensor
        columns = own + 2 * self.kv_width(tensor), (2 if self.llama else 1) * f
        matrices = [(columns[0], h), (h, own), (columns[1], h), (h, f)]
        if self.llama:
            vectors = [h, h]
        else:  # with biases, and those of norms
            vectors = [*columns, h, h, *4 * [h]]
        return _padded(matrices, vectors, shards)

    def embedding_parameters(self, tensor: int = 1, shards: int = 1) -> int:
        places = [] if self.llama else [(self.length, self.width)]
        return _padded([(-(-self.vocabulary // tensor), self.width), *places], [], shards)

    def head_parameters(self, tensor: int = 1, tied: bool = False, shards: int = 1) -> int:
        """The last norm and, unless it is the embedding's (`tied`), the matrix to the logits."""
        words = [] if tied else [(-(-self.vocabulary // tensor), self.width)]
        return _padded(words, [self.width] * (1 if self.llama else 2), shards)

    @property
    def parameters(self) -> int:
        """All of them, each once."""
        ends = self.embedding_parameters() + self.head_parameters(tied=self.tied)
        return self.layers * self.layer_parameters() + ends

    @property
    def attention_flops(self) -> int:
        """Operations a token, of Q Kᵀ and of scores V in one layer, forward; the causal half is not
        taken off, as in most papers (arXiv 2104.04473, appendix; arXiv 2204.02311, appendix B)."""
        return 4 * self.length * self.width

    @property
    def layer_flops(self) -> int:
        """Operations a token, of one layer, forward: 2 a weight, and attention."""
        matrices = 3 if self.llama else 2
        weights = 2 * self.width + 2 * self.kv_width() + matrices * self.mlp_width
        return 2 * self.width * weights + self.attention_flops

    @property
    def head_flops(self) -> int:
        return 2 * self.width * self.vocabulary

    @property
    def flops(self) -> int:
        """Operations a token, of a step: forward, and twice as many backward."""
        return 3 * (self.layers * self.layer_flops + self.head_flops)


def _padded(matrices: list[tuple[int, int]], vectors: list[int], shards: int) -> int:
    """Numbers in these, with rows that `shards` divides."""
    every = [*matrices, *((length, 1) for length in vectors)]
    return sum(-(-rows // shards) * shards * columns for rows, columns in every)


def _llama(layers: int, width: int, heads: int, hidden: int, **others: Any) -> Transformer:
    sizes: dict[str, Any] = {"length": 8192, "vocabulary": 128256, "kv_heads": 8} | others
    return Transformer(layers, width, heads, hidden=hidden, llama=True, tied=False, **sizes)


_LLAMA_2 = {"length": 4096, "vocabulary": 32000}
MODELS = {
    # Radford et al. (2019), and the released weights; Brown et al. (arXiv 2005.14165), Table 2.1;
    # Smith et al. (arXiv 2201.11990), section 2.3, vocabulary padded.
    "gpt-2": Transformer(12, 768, 12, 1024, 50257),
    "gpt-2-medium": Transformer(24, 1024, 16, 1024, 50257),
    "gpt-2-large": Transformer(36, 1280, 20, 1024, 50257),
    "gpt-2-xl": Transformer(48, 1600, 25, 1024, 50257),
    "gpt-3-175b": Transformer(96, 12288, 96, 2048, 50257),
    "mt-nlg-530b": Transformer(105, 20480, 128, 2048, 51200),
    # Touvron et al. (arXiv 2307.09288) and the released config.json; Grattafiori et al. (arXiv
    # 2407.21783), Table 3; Jiang et al. (arXiv 2310.06825), Table 1.
    "llama-2-7b": _llama(32, 4096, 32, 11008, kv_heads=32, **_LLAMA_2),
    "llama-2-13b": _llama(40, 5120, 40, 13824, kv_heads=40, **_LLAMA_2),
    "llama-2-70b": _llama(80, 8192, 64, 28672, **_LLAMA_2),
    "llama-3-8b": _llama(32, 4096, 32, 14336),
    "llama-3-70b": _llama(80, 8192, 64, 28672),
    "llama-3-405b": _llama(126, 16384, 128, 53248),
    "mistral-7b": _llama(32, 4096, 32, 14336, vocabulary=32000),
}
WITH_EXPERTS = re.compile(r"moe|mixtral|deepseek-[vr]\d|llama-4|gpt-oss|\dx\d+b|-a\d+b")


def named(name: str) -> Transformer:
    """The model of MODELS. Raises ValueError if it is not there; of one with experts, says why."""
    if name in MODELS:
        return MODELS[name]
    if WITH_EXPERTS.search(name.lower()):
        raise ValueError(
            f"{name} has experts, and the planner knows dense models only: a token uses a part of "
            "the parameters, and all_to_alls bring it to the ranks that have them"
        )
    raise ValueError(f"there is no model {name}, but {', '.join(MODELS)}")
