"""Small models of random sizes, in float64, and data for them."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import minidist as md
from fuzz.trials import Trial
from minidist import tensor_parallel

WORDS, LENGTH = 63, 8


def make(trial: Trial) -> nn.Module:
    """The trial's model, the same on every rank."""
    torch.manual_seed(trial.number)
    # Heads that all ranks can share, and for a pipeline a sequence of enough layers.
    heads = 8 if trial.strategy in ("tensor", "mixed") else None
    return MODELS[trial.model](random.Random(trial.number), heads).double()


def data(trial: Trial, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The whole batch of each backward pass of a step: rows of all ranks."""
    generator = torch.Generator().manual_seed(1000 * trial.number + step)
    rows = trial.batch * trial.world_size
    for _ in range(trial.passes):
        if trial.model in ("transformer", "llama"):
            tokens = torch.randint(WORDS, (rows, LENGTH + 1), generator=generator)
            yield tokens[:, :-1], tokens[:, 1:]
        else:
            x = torch.randn(rows, 64, generator=generator, dtype=torch.float64)
            yield x, torch.randint(10, (rows,), generator=generator)


def mlp(chance: random.Random, _: int | None) -> nn.Sequential:
    """Of any depth, also with layers that are tied, frozen, normalized, or without bias."""
    width = chance.choice([5, 8, 16])
    layers: list[nn.Module] = [nn.Linear(64, width), nn.Tanh()]
    for _ in range(chance.randint(2, 5)):
        layers.append(nn.Linear(width, width, bias=chance.random() < 0.7))
        layers.append(chance.choice([nn.Tanh(), nn.GELU(), nn.LayerNorm(width)]))
    hidden = [layer for layer in layers[2:] if isinstance(layer, nn.Linear)]
    if chance.random() < 0.3:
        hidden[0].weight = hidden[-1].weight
    if chance.random() < 0.3:
        chance.choice(hidden).requires_grad_(False)
    return nn.Sequential(*layers, nn.Linear(width, 10))


class Recurrent(nn.Module):
    """An LSTM over the rows of a digit: (B, 64) to (B, 10)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x.unflatten(1, (8, 8)))[0][:, -1])


def transformer(chance: random.Random, heads: int | None) -> md.zoo.Transformer:
    """Its output weights are tied to its embedding."""
    heads = heads or chance.choice([2, 4])
    return md.zoo.Transformer(WORDS, LENGTH, 4 * heads, heads, layers=chance.randint(2, 3))


def llama(chance: random.Random, heads: int | None) -> "Llama":
    """As many heads for keys and values as for queries, a half or a quarter."""
    heads = heads or 4
    shared = 2 if heads == 8 else chance.choice([1, 2, 4])  # so that 4 ranks have a whole one
    return Llama(heads, heads // shared, layers=chance.randint(2, 3))


def llama_plan(_: nn.Module) -> dict[str, Any]:
    """How a `Llama` is split by features."""
    columns = *(f"self_attn.{each}_proj" for each in "qkv"), "mlp.gate_proj", "mlp.up_proj"
    return {
        "model.layers.*.self_attn": tensor_parallel.heads("num_heads", "num_key_value_heads"),
        **{f"model.layers.*.{name}": "columns" for name in columns},
        **{f"model.layers.*.{name}": "rows" for name in ("self_attn.o_proj", "mlp.down_proj")},
        **{name: "sequence" for name in ("model.layers.*.*norm", "model.norm")},
        **{name: "vocabulary" for name in ("model.embed_tokens", "lm_head")},
    }


MODELS: dict[str, Callable[[random.Random, int | None], nn.Module]] = {
    "mlp": mlp,
    "lstm": lambda chance, _: Recurrent(chance.choice([4, 7])),
    "batch norm": lambda chance, _: md.zoo.convnet(chance.choice([2, 3])),
    "transformer": transformer,
    "llama": llama,
}


class Llama(nn.Module):
    """With the names of Hugging Face: rotary embedding, grouped queries, a gated MLP, RMS norms.
    (B, T) to (B, T, V)."""

    def __init__(self, heads: int, kv_heads: int, layers: int) -> None:
        super().__init__()
        width = 4 * heads
        blocks = [LlamaBlock(width, heads, kv_heads) for _ in range(layers)]
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(WORDS, width),
                "layers": nn.Sequential(*blocks),
                "norm": nn.RMSNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, WORDS, bias=False)

    def sequential(self) -> nn.Sequential:
        """The same layers, as a sequence that stages can cut."""
        blocks: Any = self.model["layers"]
        return nn.Sequential(self.model["embed_tokens"], *blocks, self.model["norm"], self.lm_head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sequential()(x)


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.self_attn, self.mlp = Attention(width, heads, kv_heads), GatedMLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class GatedMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, 2 * width, bias=False)
        self.up_proj = nn.Linear(width, 2 * width, bias=False)
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        D = width // heads
        self.num_heads, self.num_key_value_heads = heads, kv_heads
        self.q_proj = nn.Linear(width, heads * D, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * D, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * D, bias=False)
        self.o_proj = nn.Linear(heads * D, width, bias=False)
        angles = torch.arange(LENGTH)[:, None] / 100 ** (torch.arange(0, D, 2) / D)
        self.register_buffer("cos", angles.cos().repeat(1, 2))  # (T, D)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (  # (B, H, T, D)
            projection(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for projection, heads in [
                (self.q_proj, self.num_heads),
                (self.k_proj, self.num_key_value_heads),
                (self.v_proj, self.num_key_value_heads),
            ]
        )
        y = F.scaled_dot_product_attention(
            self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True
        )
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """Each pair of features is turned by the angle of its word: rotary embedding."""
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat([-b, a], -1) * self.sin
