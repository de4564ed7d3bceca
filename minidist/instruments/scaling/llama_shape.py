"""Llama in torch's own layers, on "meta": a shape that runs.

Rotary positions are left out: they have no parameters, and autograd keeps nothing of them. On
"meta", flash attention and the fused norm are those of a GPU: torch would take the attention there
that stores all scores. With numbers, as in a test, they are torch's own. Lesson: scaling_out
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from minidist.instruments.planner.transformer import Transformer
from minidist.tensor_parallel import qkv


class RMSNorm(nn.Module):
    """(…, C) to (…, C). Autograd keeps the input and a number a token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta:
            return F.rms_norm(x, self.weight.shape, self.weight)
        normed: torch.Tensor = _FusedNorm.apply(x, self.weight)
        return normed


class _FusedNorm(torch.autograd.Function):
    """Shapes alone: there is no such kernel that all devices have."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class LlamaLayer(nn.Module):
    """(B, T, C) to (B, T, C). Queries, keys and values come of one matrix, and so do gate and up,
    which alternate in it: cut by columns, it gives each rank both."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        h, f, kv = shape.width, shape.mlp_width, shape.kv_width()
        self.head = h // shape.heads
        self.groups = shape.heads // (shape.kv_heads or shape.heads)
        self.norm1, self.norm2 = RMSNorm(h), RMSNorm(h)
        self.qkv, self.out = nn.Linear(h, h + 2 * kv, bias=False), nn.Linear(h, h, bias=False)
        self.gate_up, self.down = nn.Linear(h, 2 * f, bias=False), nn.Linear(f, h, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.attend(self.qkv(self.norm1(x))))
        gate, up = self.gate_up(self.norm2(x)).unflatten(-1, (-1, 2)).unbind(-1)
        return x + self.down(F.silu(gate) * up)

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        """(B, T, Q + 2 K) to (B, T, Q), Q being wider than K by the number of groups."""
        each = qkv.shape[-1] // (self.groups + 2)  # K
        q, k, v = (
            part.unflatten(-1, (-1, self.head)).transpose(1, 2)  # (B, H, T, D)
            for part in qkv.split([self.groups * each, each, each], -1)
        )
        if q.is_meta:
            y = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)


class LlamaHead(nn.Module):
    """(B, T, C) to logits (B, T, V)."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm, self.words = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.words(self.norm(x))
        return y


class Llama(nn.Module):
    """The model of a planner's shape, on "meta". (B, T) of tokens to logits (B, T, V).
    Lesson: scaling_out.

    Raises ValueError for a shape that is not like Llama's, or whose head is tied.
    """

    def __init__(self, shape: Transformer) -> None:
        if not shape.llama or shape.tied or shape.experts:
            raise ValueError("Llama is a shape with llama=True and tied=False, without experts")
        super().__init__()
        with torch.device("meta"):
            self.embedding = nn.Embedding(shape.vocabulary, shape.width)
            self.layers = nn.Sequential(*(LlamaLayer(shape) for _ in range(shape.layers)))
            self.head = LlamaHead(shape.width, shape.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.layers(self.embedding(tokens)))
        return y

    def sequential(self) -> nn.Sequential:
        """The same layers, as a sequence that stages can cut."""
        return nn.Sequential(self.embedding, *self.layers, self.head.norm, self.head.words)


def plan_of(shape: Transformer) -> dict[str, Any]:
    """How `tensor_parallel.split` cuts a `Llama`: two pairs of columns and rows a layer."""
    return {
        "embedding": "vocabulary",
        "layers.*.norm*": "sequence",
        "layers.*.qkv": qkv(shape.heads, shape.kv_heads or shape.heads),
        "layers.*.out": "rows",
        "layers.*.gate_up": "columns",
        "layers.*.down": "rows",
        "head.norm": "sequence",
        "head.words": "vocabulary",
    }
