"""Lesson 4: DistributedDataParallel. A replica on every rank, gradients averaged while they appear.

Every rank holds the whole model and takes its own share of the batch. After the backward pass all
ranks hold the mean of their gradients, so that replicas that were equal stay equal. To read, in
this order: `replicas` (they begin equal), `buckets` (gradients travel together), `reducer` (they
leave while backward still computes), and this file. Li et al., "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training" (arXiv 2006.15704).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from minidist.distributed_data_parallel.buckets import Bucket
from minidist.distributed_data_parallel.hooks import bf16_compress_hook
from minidist.distributed_data_parallel.reducer import CommHook, Reducer
from minidist.distributed_data_parallel.replicas import (
    broadcast_state,
    require_group,
    require_same_model,
)
from minidist.wrapper import Wrapper

__all__ = ["Bucket", "DistributedDataParallel", "bf16_compress_hook"]


class DistributedDataParallel(Wrapper, Joinable):
    """Trains replicas of `module`, one on each rank of a group, as one model. Lesson 4.

        model = md.DistributedDataParallel(model)       # then train as on one process:
        loss_fn(model(my_share), my_targets).backward()
        optimizer.step()                                # each .grad is the mean over all ranks

    At construction every rank takes rank 0's parameters and buffers. When `backward()` returns,
    each `.grad` is the mean over the ranks, and a view into a bucket.

    process_group: the ranks that take part; None is the default group.
    bucket_cap_mb: a bucket is full at so many MiB (the first one at 1 MiB), as in torch.
    broadcast_buffers: the forward pass after one for training first gives every rank rank 0's
        buffers, such as the running means of batch norm.
    find_unused_parameters: a parameter may be left without gradient by a backward pass. Left out
        on some ranks, it counts there as zero; on all, its `.grad` stays as it was. Costs a small
        message a pass, and the overlap of the buckets that wait for such a parameter.

    Raises RuntimeError without a process group; ValueError, on every rank, if the ranks have
    different models or nothing to train. `forward` raises RuntimeError if a parameter has changed
    its shape, dtype or device since; `backward`, if a parameter is left without gradient unasked.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        Wrapper.__init__(self, module)
        Joinable.__init__(self)
        if bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb must be more than 0, not {bucket_cap_mb}")
        self.process_group = require_group(process_group, "DistributedDataParallel")
        require_same_model(module, self.process_group)
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError("DistributedDataParallel: the module has no parameter to train")
        broadcast_state([*module.parameters(), *module.buffers()], self.process_group)
        self.broadcast_buffers = broadcast_buffers
        self.require_backward_grad_sync = True
        self._stale_buffers = False
        self._divide_by_initial_world_size = True
        self._trained = [(name, parameter, _kind(parameter)) for name, parameter in trained.items()]
        cap = int(bucket_cap_mb * 2**20)
        self._reducer = Reducer(trained, self.process_group, cap, find_unused_parameters)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own, between what the ranks do together before and after."""
        if self._reducer.begun:  # computed again within its backward pass, by a checkpoint
            return self.module(*inputs, **kwargs)
        self._require_unchanged()
        Join.notify_join_context(self)
        self._prepare(torch.is_grad_enabled() and self.require_backward_grad_sync)
        output = self.module(*inputs, **kwargs)
        self._reducer.watch(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do not average after the forward passes within the block: their gradients add up on each
        rank. The backward pass of the next forward pass outside averages the sums."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let `hook(state, bucket)` average the buckets, instead of all_reduce. As in torch it
        returns a Future of the average, of shape (n,), and divides by the world size itself."""
        if self._reducer.comm_hook is not None:
            raise RuntimeError("a communication hook is registered already")
        if not callable(hook):
            raise TypeError(f"a communication hook is a function, not {type(hook).__name__}")
        self._reducer.comm_hook = hook, state

    def _require_unchanged(self) -> None:
        for name, parameter, kind in self._trained:
            if _kind(parameter) != kind:
                raise RuntimeError(
                    f"parameter {name} has changed since it was wrapped, from {_tell(kind)} to "
                    f"{_tell(_kind(parameter))}. Change a module first, and wrap it then."
                )

    def _prepare(self, sync: bool, active: bool = True) -> bool:
        """What the ranks do together before a forward pass. `active`: this one still has batches.
        Returns whether they will average after it."""
        rebuild, stale = sync and self._reducer.may_rebuild, self._stale_buffers
        source, contributors = 0, dist.get_world_size(self.process_group)
        if self._join_config.enable:  # a rank without batches has to be told
            votes = torch.zeros(3 + contributors, device=self.join_device)
            if active:
                votes[:3] = torch.tensor([sync, rebuild, stale])
                votes[3 + dist.get_rank(self.process_group)] = 1
            dist.all_reduce(votes, group=self.process_group)
            sync, rebuild, stale = (votes[:3] > 0).tolist()
            there = votes[3:].nonzero().flatten().tolist()
            source = there[0]
            if not self._divide_by_initial_world_size:
                contributors = len(there)
        if rebuild:
            self._reducer.rebuild(source)
        if stale:
            broadcast_state(self.module.buffers(), self.process_group, source)
        self._stale_buffers = sync and self.broadcast_buffers
        if torch.is_grad_enabled():  # an evaluation in between changes nothing
            self._reducer.expect(sync, contributors)
        return sync

    # ---- ranks with different numbers of batches -------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Train within this block when ranks have different numbers of batches, as in torch.

        A rank whose batches are used up answers the collectives of the others, and in the end takes
        their model. The sum of the gradients is divided by the number of all ranks, or by that of
        the ranks that still train. Several modules or optimizers: torch's `Join([...])`.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch's `Join`."""
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """For torch's `Join`: where its small messages live."""
        return self._trained[0][1].device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """For torch's `Join`."""
        return self.process_group


class _Shadow(JoinHook):
    """What a rank without batches does while others train."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp

    def main_hook(self) -> None:
        """Answer the collectives of one forward and one backward pass."""
        if self._ddp._prepare(sync=False, active=False):
            self._ddp._reducer.answer()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the model of a rank that has trained until the end."""
        ddp, group = self._ddp, self._ddp.process_group
        rank = dist.get_rank(group) if is_last_joiner else -1
        last = torch.tensor([rank], device=ddp.join_device)
        dist.all_reduce(last, dist.ReduceOp.MAX, group)
        broadcast_state([*ddp.module.parameters(), *ddp.module.buffers()], group, int(last))


def _kind(parameter: torch.Tensor) -> tuple[Any, ...]:
    return parameter.shape, parameter.dtype, parameter.device


def _tell(kind: tuple[Any, ...]) -> str:
    shape, dtype, device = kind
    return f"shape {tuple(shape)}, {str(dtype).removeprefix('torch.')}, on {device}"
