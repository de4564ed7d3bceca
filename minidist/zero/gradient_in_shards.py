"""The `.grad` of a parameter whose gradient is in shards, one on each rank (stage 2 of ZeRO).

If it were None, torch.nn.utils.clip_grad_norm_ would pass over it, and clip nothing without a word.
Lesson: zero
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from minidist.common.norm import norms_over_ranks
from minidist.zero.partition import Piece


class GradientInShards(torch.Tensor):
    """Without elements or memory. Its norms are those of the whole gradient: all ranks must take
    them. What is done in place, as clipping does, is done to this rank's shard. All else raises
    RuntimeError."""

    piece: Piece | None
    group: dist.ProcessGroup

    @staticmethod
    def __new__(
        cls, parameter: nn.Parameter, piece: Piece | None, group: dist.ProcessGroup
    ) -> "GradientInShards":
        """piece: what this rank has of the parameter, if it has a part of it."""
        made: GradientInShards = torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.shape,
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
            storage_size=0,
        )
        made.piece, made.group = piece, group
        return made

    @property
    def shard(self) -> torch.Tensor:
        """This rank's part: (n,), of no elements on some ranks."""
        mine = None if self.piece is None else self.piece.own.grad
        return torch.empty(0, dtype=self.dtype, device=self.device) if mine is None else mine

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GradientInShards(of shape {tuple(self.shape)})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        shards = tree_map_only(cls, lambda gradient: gradient.shard, args)
        several = isinstance(args[0], list)
        first = args[0][0] if several else args[0]
        if name in ("linalg_vector_norm", "_foreach_norm"):
            norm_type = args[1] if len(args) > 1 else 2
            own = shards[0] if several else shards[:1]
            norms = norms_over_ranks(own, norm_type, first.group, first.device)
            return norms if several else norms[0]
        if "non_finite_check" in name:
            raise RuntimeError(
                "torch.amp.GradScaler looks at one rank's gradients, and here each rank has other "
                "ones: use minidist.ShardedGradScaler"
            )
        if not (name.endswith("_") and isinstance(first, cls)):
            raise RuntimeError(
                "this parameter's gradient is in shards, one on each rank: in the .grad of the "
                f"optimizer's `shards`. Its whole is nowhere, so there is no {name} of it. The "
                "optimizer that takes steps is the one of the ShardedDataParallel"
            )
        func(*shards, **(kwargs or {}))
        return args[0]
