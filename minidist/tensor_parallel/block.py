"""A transformer block that is split by features: two messages forward, two backward.

    x + out(attention(qkv(norm1(x))))    qkv: column, whole heads to each rank;    out: row
    x + mlp(norm2(x))                    mlp: column, GELU, row

The norms, dropouts and sums in between are computed by every rank alike; or, sequence parallel, by
each rank for its part of the tokens. Then a gather_from_sequence and a reduce_scatter_to_sequence
stand where an all_reduce was: they cost no more bytes, and the activations in between are sharded.
Shoeybi et al. (arXiv 1909.08053), section 3; Korthikanti et al. (arXiv 2205.05198), section 4.2.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from minidist.common.wrapper import Wrapper
from minidist.tensor_parallel.layer import OfGroup, require_multiple
from minidist.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from minidist.tensor_parallel.operators import Group, copy_to_group, local
from minidist.tensor_parallel.qkv import QKVParallelLinear
from minidist.tensor_parallel.random import fork_rng


@contextmanager
def shown(modules: Iterable[nn.Module], view: Callable[[Any], Any]) -> Iterator[None]:
    """Within the block the modules find, in the place of a parameter, what `view` makes of it."""
    # Where Python looks before it asks nn.Module, so `parameters()` stays as it is. And where
    # FullyShardedDataParallel puts full parameters: so not by torch.func.functional_call, which
    # puts them where that has its local shards.
    places = [
        (vars(module), name, getattr(module, name))
        for module in modules
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    before = [own.get(name) for own, name, _ in places]
    try:
        for own, name, parameter in places:
            own[name] = view(parameter)
        yield
    finally:
        for (own, name, _), value in zip(places, before, strict=True):
            own.pop(name, None)
            if value is not None:
                own[name] = value


class SequenceParallel(OfGroup, Wrapper):
    """A replicated module, such as a norm, that sees only this rank's part of the tokens.

    Its weights go through `copy_to_group`: in backward, their gradients are summed over the ranks.
    Lesson: sequence_parallel.
    """

    def __init__(self, module: nn.Module, process_group: Group = None) -> None:
        super().__init__(module)
        self.process_group = process_group

    def forward(self, *inputs: Any) -> Any:
        with shown(self.module.modules(), lambda p: copy_to_group(local(p), self.process_group)):
            return self.module(*inputs)


class ParallelBlock(OfGroup):
    """A transformer block, (B, T, C) to (B, T, C), that is split by features.

    Equal to `zoo.Block`, with the same names and, for one seed, the same weights.

    width, heads: C, and the number of query heads of the whole block.
    kv_heads: fewer for grouped-query attention, see `QKVParallelLinear`.
    dropout: the share that is dropped of attention's weights and of what is added to x. Where
        tensors are replicated all ranks drop the same, elsewhere each its own (see `fork_rng`).
    sequence_parallel: x is sharded along the sequence, (B, T / t, C).

    Raises ValueError if the ranks cannot share the heads, or the hidden features, evenly.
    Lesson: feature_splitting.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        dropout: float = 0.0,
        process_group: Group = None,
        *,
        sequence_parallel: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.dropout, self.process_group = dropout, process_group
        self.sequence_parallel = sequence_parallel
        kind: dict[str, Any] = dict(device=device, dtype=dtype)
        options = dict(process_group=process_group, sequence_parallel=sequence_parallel, **kind)
        self.norm1 = self._norm(nn.LayerNorm(width, **kind))
        self.norm2 = self._norm(nn.LayerNorm(width, **kind))
        require_multiple(width, heads, "width over heads")
        outputs = width // heads * (heads + 2 * (kv_heads or heads))
        self.qkv = QKVParallelLinear(
            width, outputs, bias=False, heads=heads, kv_heads=kv_heads, **options
        )
        self.out = RowParallelLinear(width, width, **options)
        self.mlp = nn.Sequential(
            ColumnParallelLinear(width, 4 * width, **options),
            nn.GELU(),
            RowParallelLinear(4 * width, width, **options),
        )

    @classmethod
    def from_dense(cls, block: Any, process_group: Group = None, **options: Any) -> Self:
        """This rank's shard of a `zoo.Block`, which must be the same on every rank. `options` are
        those of the constructor."""
        width, heads = block.qkv.in_features, block.heads
        self = cls(width, heads, process_group=process_group, device="meta", **options)
        self.norm1 = self._norm(copy.deepcopy(block.norm1))
        self.norm2 = self._norm(copy.deepcopy(block.norm2))
        for name in ("qkv", "out", "mlp.0", "mlp.2"):
            self.get_submodule(name).take(block.get_submodule(name))  # type: ignore[operator]
        return self.train(block.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._drop(self.attention(self.norm1(x)))
        return x + self._drop(self.mlp(self.norm2(x)))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """Causal self-attention, of this rank's heads between the two layers."""
        ranks, D = self.qkv.world_size, self.qkv.head_dim
        queries, kv = self.qkv.heads // ranks, max(1, self.qkv.kv_heads // ranks)
        q, k, v = (
            each.unflatten(-1, (-1, D)).transpose(1, 2)  # (B, H / t, T, D)
            for each in self.qkv(x).split([queries * D, kv * D, kv * D], dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        with fork_rng(self.process_group) if dropout else nullcontext():
            attended = F.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=queries > kv
            )
        return self.out(attended.transpose(1, 2).flatten(2))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or not self.dropout:
            return x
        with fork_rng(self.process_group) if self.sequence_parallel else nullcontext():
            return F.dropout(x, self.dropout)

    def _norm(self, norm: nn.Module) -> nn.Module:
        return SequenceParallel(norm, self.process_group) if self.sequence_parallel else norm
