"""The shape of a transformer: its parameters, and the operations of its forward pass. Models with
published shapes are in MODELS. Lessons: zero, experts."""

from dataclasses import dataclass, fields
from typing import Any

from minidist.instruments.planner.model_states import require_whole


@dataclass(frozen=True)
class Transformer:
    """A decoder of `layers` layers, `width` wide (h), with sequences of `length` tokens (s).

    Like GPT: biases, layer norms, learned positions, an MLP of two matrices. With `llama`: no
    biases, RMS norms, rotary positions, a gated MLP of three matrices.

    kv_heads: of keys and values, for grouped queries; None means `heads`.
    hidden: how wide the MLP is; None means 4h. With experts, each of them is as wide.
    tied: the head's weights are the embedding's.
    dropout: behind the attention scores, the attention, and the MLP; it only costs memory here.
    head_width: of queries, keys and values; None means h / heads.
    attention: parameters of a layer's attention, if it is of another kind, such as DeepSeek's.
    experts, active: in place of an MLP, each layer has so many (E), of which a token uses k. There
        is a router of E rows. Biases of experts are left out. Lesson: experts.
    shared: experts that every token uses, besides.
    dense_layers: the first ones have an MLP in place of experts, of k + `shared` times `hidden`.
    of_nodes: a token's experts are on so many nodes at most, as by DeepSeek-V3.

    Raises ValueError for a number that is no whole one from 1 on, for heads that do not divide, for
    k above E, and if all layers are dense.
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
    head_width: int | None = None
    attention: int | None = None
    experts: int = 0
    active: int = 1
    shared: int = 0
    dense_layers: int = 0
    of_nodes: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            number = getattr(self, each.name)
            if number is not None and each.type is not bool and (number or each.default != 0):
                require_whole(each.name, number)
        if self.width % self.heads and not self.head_width:
            raise ValueError(f"a width of {self.width} cannot be shared by {self.heads} heads")
        if self.heads % (self.kv_heads or 1):
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads")
        if self.experts and self.active > self.experts:
            raise ValueError(f"a token cannot use {self.active} of {self.experts} experts")
        if self.dense_layers >= self.layers:
            raise ValueError(f"all {self.layers} layers are dense: none has experts")

    @property
    def attention_width(self) -> int:
        """Of all heads together."""
        return self.heads * (self.head_width or self.width // self.heads)

    def kv_width(self, tensor: int = 1) -> int:
        """How wide the keys are, on one of `tensor` ranks. Each has one head at least."""
        return self.attention_width // self.heads * self.kv_heads_of(tensor)

    def kv_heads_of(self, tensor: int = 1) -> int:
        return max(1, (self.kv_heads or self.heads) // tensor)

    @property
    def expert_width(self) -> int:
        return self.hidden or 4 * self.width

    @property
    def mlp_width(self) -> int:
        """Of all that a token uses of it."""
        return self.expert_width * (self.active + self.shared if self.experts else 1)

    @property
    def sparse_layers(self) -> int:
        """How many have experts."""
        return self.layers - self.dense_layers if self.experts else 0

    def products(self, tensor: int = 1) -> list[tuple[int, int]]:
        """A dense layer's matrix products in the order of forward, on one of `tensor` ranks: how
        wide the result is, and operations a token. Queries, keys, values, output; (gate,) up,
        down."""
        h, kv = self.width, self.kv_width(tensor)
        own, f = self.attention_width // tensor, self.mlp_width // tensor
        up = [(f, h)] * (2 if self.llama else 1)
        sizes = [(own, h), (kv, h), (kv, h), (h, own), *up, (h, f)]
        return [(wide, 2 * wide * deep) for wide, deep in sizes]

    def layer_parameters(self, tensor: int = 1, shards: int = 1, dense: bool = False) -> int:
        """Of one layer, on one of `tensor` ranks: qkv and the MLP's first matrices are cut by
        columns, the others by rows (arXiv 1909.08053, section 3). Lesson: feature_splitting.
        Without its experts, which `expert_parameters` counts; `dense`: of one of `dense_layers`.

        shards: each of so many ranks gets as many rows of a parameter, some of them padding, as in
        ZeRO-3. Queries, keys and values are one matrix, and so are gate and up."""
        h, own, sparse = self.width, self.attention_width // tensor, self.experts and not dense
        f = (self.expert_width * self.shared if sparse else self.mlp_width) // tensor
        columns = own + 2 * self.kv_width(tensor), (2 if self.llama else 1) * f
        matrices = [(columns[1], h), (h, f), (self.experts if sparse else 0, h)]
        vectors = [h, h]
        if not self.llama:  # with biases, and those of norms
            vectors = [columns[0], h, *4 * [h]] + ([] if sparse else [columns[1], h])
        if self.attention:
            vectors.append(self.attention // tensor)
        else:
            matrices += [(columns[0], h), (h, own)]
        return _padded(matrices, vectors, shards)

    def expert_parameters(self, number: int | None = None) -> int:
        """Of so many experts of a layer; None: of all."""
        one = (3 if self.llama else 2) * self.width * self.expert_width
        return one * (self.experts if number is None else number)

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
        sparse = self.sparse_layers
        routed = sparse * (self.layer_parameters() + self.expert_parameters())
        return routed + (self.layers - sparse) * self.layer_parameters(dense=True) + ends

    @property
    def active_parameters(self) -> int:
        """Those that a token uses, with all of the embedding, which some makers leave out."""
        unused = self.experts - self.active
        return self.parameters - self.sparse_layers * self.expert_parameters(unused)

    @property
    def attention_flops(self) -> int:
        """Operations a token, of Q Kᵀ and of scores V in one layer, forward; the causal half is not
        taken off, as in most papers (arXiv 2104.04473, appendix; arXiv 2204.02311, appendix B)."""
        return 4 * self.length * self.attention_width

    @property
    def layer_flops(self) -> int:
        """Operations a token, of one layer, forward: 2 a weight that it uses, and attention. A
        layer of `dense_layers` has as many, but for the router's."""
        matrices = 3 if self.llama else 2
        attention = self.attention or 2 * self.width * (self.attention_width + self.kv_width())
        mlp = self.width * (matrices * self.mlp_width + self.experts)
        return 2 * (attention + mlp) + self.attention_flops

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


# Of each of 128 heads, queries and keys are 192 wide, values 128: products as of 160. Parameters:
# of queries by way of 1,536 numbers, of keys and values by way of 512, and 64 more of each key.
_QUERIES, _KEYS = 7168 * 1536 + 1536 * (1 + 128 * 192), 7168 * 576 + 512 * (1 + 128 * 256)
_DEEPSEEK = {"vocabulary": 129280, "experts": 256, "active": 8, "shared": 1, "dense_layers": 3}
_DEEPSEEK |= {"attention": _QUERIES + _KEYS + 128 * 128 * 7168, "head_width": 160, "kv_heads": 128}
_DEEPSEEK |= {"length": 4096, "of_nodes": 4}
_GPT_OSS = {"length": 4096, "vocabulary": 201088, "active": 4, "head_width": 64}
_QWEN = dict(length=4096, vocabulary=151936, experts=128, active=8, head_width=128, kv_heads=4)
_OLMOE = {"length": 4096, "vocabulary": 50304, "experts": 64, "active": 8, "kv_heads": 16}
_LLAMA_2 = {"length": 4096, "vocabulary": 32000}
_MIXTRAL = _LLAMA_2 | {"experts": 8, "active": 2}
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
    # With experts, from released config.json files, the last one's without its extra layer that
    # predicts a second token, on sequences of 4,096. Left out are biases and norms of single heads:
    # 0.05 % at most.
    "mixtral-8x7b": _llama(32, 4096, 32, 14336, **_MIXTRAL),
    "mixtral-8x22b": _llama(56, 6144, 48, 16384, **_MIXTRAL),
    "olmoe-1b-7b": _llama(16, 2048, 16, 1024, **_OLMOE),
    "qwen3-30b-a3b": _llama(48, 2048, 32, 768, **_QWEN),
    "qwen3-235b-a22b": _llama(94, 4096, 64, 1536, **_QWEN),
    "gpt-oss-20b": _llama(24, 2880, 64, 2880, experts=32, **_GPT_OSS),
    "gpt-oss-120b": _llama(36, 2880, 64, 2880, experts=128, **_GPT_OSS),
    "deepseek-v3": _llama(61, 7168, 128, 2048, **_DEEPSEEK),
}


def named(name: str) -> Transformer:
    """The model of MODELS. Raises ValueError if it is not there."""
    if name in MODELS:
        return MODELS[name]
    raise ValueError(f"there is no model {name}, but {', '.join(MODELS)}")
