"""Stage 2 (lesson: zero): a rank also holds no more of the gradients than its shard."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist.common.agree import raise_on_every_rank
from minidist.common.guard import Guard
from minidist.common.no_sync import Synchronized
from minidist.common.norm import clip_grad_norm_
from minidist.common.replicas import broadcast_state, require_same_model
from minidist.zero.shard_reducer import ShardReducer
from minidist.zero.sharded_optimizer import ZeroRedundancyOptimizer


class ShardedDataParallel(Synchronized):
    """Trains replicas of `module` whose gradients and optimizer states are shared out. ZeRO, stage
    2. Lesson: zero.

        optimizer = md.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
        model = md.ShardedDataParallel(model, optimizer)

    Train as with `DistributedDataParallel`, with this optimizer. When `backward()` returns, the
    mean of the gradients is where its optimizer is: each rank has its shard, in the `.grad` of
    `optimizer.shards`. A parameter's own `.grad` has no elements: clipping by torch.nn.utils takes
    its norm over all shards and scales them, all else raises. A parameter without gradient on some
    ranks counts there as zero; on all ranks, its `.grad` stays None, and the optimizer passes over
    it. After FairScale's ShardedDDP.

    optimizer: a `ZeroRedundancyOptimizer` of all parameters of the module that are trained, or
        several that share them. Their gradients leave in buckets, the last parameters first: as
        backward comes to them, if an optimizer has the order of the module. Else more of them wait
        in memory.

    At construction, and for buffers before each forward pass, every rank takes what rank 0 has.
    Raises TypeError for another optimizer; ValueError, on every rank, if the ranks have different
    models, or the optimizers have other groups, or other parameters than the module. `backward`
    and methods of the module raise RuntimeError as those of `DistributedDataParallel` do.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: ZeroRedundancyOptimizer | Sequence[ZeroRedundancyOptimizer],
    ) -> None:
        super().__init__(module)
        several = isinstance(optimizer, list | tuple) and len(optimizer) > 0
        optimizers: list[Any] = list(optimizer) if several else [optimizer]  # type: ignore[arg-type]
        for each in optimizers:
            if not isinstance(each, ZeroRedundancyOptimizer):
                raise TypeError(
                    "ShardedDataParallel needs a ZeroRedundancyOptimizer, which knows who owns "
                    f"what, not {type(each).__name__}"
                )
        group = optimizers[0].process_group
        flats = [flat for each in optimizers for flat in each._flats]
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        owned = [parameter for flat in flats for parameter in flat.parameters]
        raise_on_every_rank(group, _problem(trained, owned, optimizers, group))
        require_same_model(module, group)
        broadcast_state([*module.parameters(), *module.buffers()], group)
        self.process_group = group
        self._optimizers = optimizers
        self._stale_buffers = True  # rank 0 may change some until the first pass
        self._guard = Guard(module, "ShardedDataParallel")
        self._reducer = ShardReducer(trained, flats, group)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own. A pass that trains leaves other buffers on each rank: the next pass
        takes rank 0's."""
        if self._reducer.begun:  # computed again within its backward pass, by a checkpoint
            return self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():
            self._guard.require_unchanged(self.module)
            for optimizer in self._optimizers:
                optimizer._require_unchanged()
        if self._stale_buffers:
            broadcast_state(self.module.buffers(), self.process_group)
        self._stale_buffers = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled():
            self._reducer.expect(self.require_backward_grad_sync)
        output = self.module(*inputs, **kwargs)
        self._reducer.watch(output)
        return output

    def __getstate__(self) -> Any:
        raise TypeError(
            "a ShardedDataParallel cannot be copied or saved: its optimizer has its gradients. "
            "Copy its module, or save its state_dict()"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the parameters, and of this rank's shards."""
        super().zero_grad(set_to_none)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that their norm, that of all shards together, is at most
        `max_norm`. Returns what it was, a number. All ranks must call it.

        torch.nn.utils.clip_grad_norm_ does the same, by one all_reduce for each parameter.
        """
        shards = [shard for optimizer in self._optimizers for shard in optimizer.shards]
        device = next(self.module.parameters()).device
        groups = [self.process_group]
        return clip_grad_norm_(shards, max_norm, norm_type, groups=groups, device=device)


def _problem(
    trained: dict[str, nn.Parameter],
    owned: list[nn.Parameter],
    optimizers: list[ZeroRedundancyOptimizer],
    group: dist.ProcessGroup,
) -> ValueError | None:
    if any(group is not optimizer.process_group for optimizer in optimizers):
        return ValueError("the optimizers were made for different process groups")
    once = set(owned)
    for name, parameter in trained.items():
        if parameter not in once:
            return ValueError(
                f"the optimizer does not have the module's parameter {name}: make it of "
                "module.parameters(), after the module is moved, unfrozen or changed"
            )
    if len(once) < len(owned):
        return ValueError(
            f"{len(owned) - len(once)} parameters are in two optimizers: each needs one owner"
        )
    if len(owned) > len(trained):
        return ValueError(
            f"the optimizer has {len(owned) - len(trained)} parameters that the module does not "
            "train: give ShardedDataParallel the whole model"
        )
    return None
