"""The course's small models and its real data, none of which is downloaded."""

import time
from importlib.util import find_spec
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function

from minidist.instruments.measure.timeline import noted


def digits(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """The 1,797 handwritten digits that come with scikit-learn, in a fixed shuffled order.

    Returns images (1797, 64), of values from 0 to 1, and labels (1797,), from 0 to 9. Raises
    ImportError if scikit-learn is missing. Source: the UCI "Optical Recognition of Handwritten
    Digits" test set.
    """
    found = find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise ImportError('the digits need scikit-learn: pip install "minidist[course]"')
    # Only its file: an import of scikit-learn takes more than a second, in each rank anew.
    file = Path(found.submodule_search_locations[0], "datasets/data/digits.csv.gz")
    table = torch.from_numpy(np.loadtxt(file, delimiter=","))  # (1797, 65): the label comes last
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    return table[:, :-1].to(dtype) / 16, table[:, -1].long()


def mlp(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Linear layers of the given sizes with ReLU between, the same on every rank for one seed.

    `mlp(64, 32, 10)` maps (B, 64) to (B, 10). Raises ValueError for fewer than two sizes.
    """
    if len(sizes) < 2:
        raise ValueError(f"an MLP has at least an input and an output size, not {sizes}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for inputs, outputs in zip(sizes, sizes[1:], strict=False):
            layers += [nn.Linear(inputs, outputs, dtype=dtype), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def text(length: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's own help pages as bytes, in pieces of `length`, in a fixed shuffled order.

    Returns inputs and targets, both (N, length), of values from 0 to 255: each target is the byte
    after its input. N depends on the version of torch (0.5 MB in all). Raises ValueError for a
    length below 1. Source: the docstrings of the functions that torch has in C++.
    """
    if length < 1:
        raise ValueError(f"pieces of text have a length of 1 or more, not {length}")
    functions = [f for _, f in sorted(vars(torch).items()) if isinstance(f, BuiltinFunctionType)]
    data = "".join(f.__doc__ or "" for f in functions).encode()
    count = (len(data) - 1) // length
    written = torch.frombuffer(bytearray(data[: count * length + 1]), dtype=torch.uint8).long()
    inputs, targets = written[:-1].view(count, length), written[1:].view(count, length)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return inputs[order], targets[order]


def convnet(channels: int = 8, seed: int = 0) -> nn.Sequential:
    """A convolution with batch norm for the digits: (B, 64) to (B, 10)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),  # (B, 1, 8, 8)
            nn.Conv2d(1, channels, 3, bias=False),  # (B, C, 6, 6)
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),  # (B, C, 3, 3)
            nn.Flatten(),
            nn.Linear(channels * 9, 10),
        )


class Block(nn.Module):
    """A layer of `Transformer`: attention, then an MLP, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_size = heads, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) to (B, T, C)."""
        q, k, v = (
            each.unflatten(-1, (self.heads, self.head_size)).transpose(1, 2)  # (B, H, T, C / H)
            for each in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Embedding(nn.Module):
    """The first layer of `Transformer`: a vector for each byte, and one for its position."""

    def __init__(self, tokens: nn.Embedding, positions: nn.Embedding) -> None:
        super().__init__()
        self.tokens, self.positions = tokens, positions

    def forward(self, given: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """(B, T) to (B, T, C); or such tokens and their positions, (T,) or (B, T)."""
        tokens, positions = given if isinstance(given, tuple) else (given, None)
        return self.tokens(tokens) + self.positions(_positions(tokens, positions))


class Transformer(nn.Module):
    """A small language model of bytes, its output weights tied to its embedding.

    (B, T) of values below `vocabulary` to logits (B, T, vocabulary); T is at most `length`.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        length: int = 32,
        width: int = 32,
        heads: int = 2,
        layers: int = 2,
        seed: int = 0,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(vocabulary, width)
            self.positions = nn.Embedding(length, width)
            self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, vocabulary, bias=False)
            nn.init.normal_(self.tokens.weight, std=0.02)
            # As small as the tokens: positions of torch's own size, 1, would drown them.
            nn.init.normal_(self.positions.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """(B, T) to (B, T, V). positions: (T,) or (B, T), those of the tokens; None: 0, 1, …"""
        x = self.tokens(tokens) + self.positions(_positions(tokens, positions))  # (B, T, C)
        return self.head(self.norm(self.blocks(x)))

    def sequential(self) -> nn.Sequential:
        """The same layers, with the same parameters, as a sequence that stages can cut."""
        embedding = Embedding(self.tokens, self.positions)
        return nn.Sequential(embedding, *self.blocks, self.norm, self.head)


def _positions(tokens: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device) if given is None else given


class DecoderLayer(nn.Module):
    """A layer of `Decoder`. Of `heads` heads of queries, heads / kv_heads in a row share one of
    keys and values."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_size = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v = (
            nn.Linear(width, each * self.head_size, bias=False)
            for each in (heads, kv_heads, kv_heads)
        )
        self.out = nn.Linear(width, width, bias=False)
        up = nn.Linear(width, 4 * width, bias=False)
        self.mlp = nn.Sequential(up, nn.SiLU(), nn.Linear(4 * width, width, bias=False))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(B, T, C) to (B, T, C)."""
        normed = self.norm1(x)
        q, k, v = (
            each(normed).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # (B, H, T, D)
            for each in (self.q, self.k, self.v)
        )
        q, k = rotate(q, positions), rotate(k, positions)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """RoPE: x (B, H, T, D), of which each pair of features turns by an angle that grows with the
    token's position, (T,) or (B, T). So a query times a key depends on their distance alone."""
    a, b = x.chunk(2, dim=-1)
    exact = torch.promote_types(x.dtype, torch.float32)  # bfloat16 has no 257
    steps = torch.arange(a.shape[-1], dtype=exact, device=x.device) / a.shape[-1]
    angles = positions[..., None, :, None] * 10_000.0**-steps  # (1, T, D / 2) or (B, 1, T, D / 2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Decoder(nn.Module):
    """A small language model of bytes with what Llama has: rotary positions, RMSNorm, grouped
    queries, no biases. It has no table of positions, so T has no limit. Lesson: long_sequences.

    (B, T) of values below `vocabulary` to logits (B, T, vocabulary).
    """

    def __init__(
        self,
        vocabulary: int = 256,
        width: int = 32,
        heads: int = 4,
        kv_heads: int = 2,
        layers: int = 2,
        seed: int = 0,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(vocabulary, width)
            nn.init.normal_(self.tokens.weight, std=0.02)
            made = (DecoderLayer(width, heads, kv_heads) for _ in range(layers))
            self.layers = nn.ModuleList(made)
            self.norm = nn.RMSNorm(width)
            self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """(B, T) to (B, T, V). positions: (T,) or (B, T), those of the tokens; None: 0, 1, …"""
        positions = _positions(tokens, positions)
        x = self.tokens(tokens)  # (B, T, C)
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(self.norm(x))


class Sleep(nn.Module):
    """A layer whose time is known: `ms_per_row` for each row forward, and twice that backward, one
    half for the inputs and one for the weights. (rows, …) comes out as it went in.

    Sleeping needs no core. So ranks on two cores take the time that they would on their own ones.
    In a trace it counts as computing, and in a `Timeline`. It has so many `parameters`, all 0, to
    be sent from rank to rank. Lesson: layer_splitting.
    """

    def __init__(self, ms_per_row: float, parameters: int = 1) -> None:
        super().__init__()
        self.ms_per_row, self.weight = ms_per_row, nn.Parameter(torch.zeros(parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seconds = self.ms_per_row * len(x) / 1e3
        for_weights = seconds if x.requires_grad else 2 * seconds  # nothing for the first inputs
        slept: torch.Tensor = _Sleep.apply(x, seconds, seconds)
        return slept + _Sleep.apply(self.weight, 0.0, for_weights)[:1]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        with record_function("compute forward"), noted("forward"):
            time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        with record_function("compute backward"), noted("backward"):
            time.sleep(ctx.seconds)
        return gradient, None, None
