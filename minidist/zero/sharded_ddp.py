"""Stage 2 (lesson: zero): a rank also holds no more of the gradients than its rows.

As in DistributedDataParallel they leave in buckets while backward still computes, and each rank
adds its own. But a rank gets back its rows of the mean alone, and the memory of the bucket ends
there: one bucket fills while another travels, and the whole gradient is never in memory at once.
"""

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from minidist.distributed_data_parallel.ddp import DistributedDataParallel
from minidist.distributed_data_parallel.reducer import remove
from minidist.machine import backend
from minidist.zero.sharded_optimizer import ZeroRedundancyOptimizer
from minidist.zero.shards import Cut, deal, reduce_scatter


class PassingBucket:
    """The gradients of some parameters. Its memory is there from the first one until the bucket has
    travelled."""

    def __init__(self, parameters: Sequence[nn.Parameter], cut: Cut) -> None:
        self.cut, self.parameters, self.missing = cut, parameters, set(parameters)
        self.sizes = [cut.rows(p) * p[:1].numel() for p in parameters]
        ends = zip(parameters, self.sizes, accumulate(self.sizes), strict=True)
        self.places = {p: slice(end - size, end) for p, size, end in ends}
        self.flat: torch.Tensor | None = None  # (N, S): of each rank its rows

    def take(self, parameter: nn.Parameter, scale: float) -> None:
        """Its gradient, times scale, or zeros: the parameter has it no longer."""
        if self.flat is None:
            ranks, like = self.cut.ranks, parameter
            self.flat = backend.scratch(
                ranks, sum(self.sizes), dtype=like.dtype, device=like.device, group=self.cut.group
            )
        place = self.places[parameter]
        if parameter.grad is None:
            self.flat[:, place] = 0
        else:
            deal(self.flat[:, place], parameter.grad, scale)
        parameter.grad = None

    def leave(self) -> None:
        """Begin to give each rank the sum of its rows."""
        assert self.flat is not None
        self._arrive, self.flat = reduce_scatter(self.flat.view(-1), self.cut.group), None

    def arrive(self) -> dict[nn.Parameter, torch.Tensor]:
        """This rank's rows of each parameter's gradient."""
        rows = self._arrive().split(self.sizes)
        del self._arrive  # and with it the memory
        each = zip(self.parameters, map(self.cut.own, self.parameters), rows, strict=True)
        return {p: x[: own.numel()].view(own.shape) for p, own, x in each}


class ShardBuckets:
    """Give each rank of `group` its rows of the mean gradients, in `.grad`, as DTensors. The
    methods are those of DistributedDataParallel's `Buckets`."""

    def __init__(self, plan: Sequence[Sequence[nn.Parameter]], cut: Cut) -> None:
        self._cut, self.scale = cut, 1 / cut.ranks
        # A parameter does not hold its node, and the node holds this hook.
        self._nodes = {p: get_gradient_edge(p).node for bucket in plan for p in bucket}
        nodes, kept = self._nodes.items(), cut.kept
        hooks = [node.register_prehook(partial(_set_aside, kept, p)) for p, node in nodes]
        weakref.finalize(self, remove, hooks)
        self._travelling: PassingBucket | None = None
        self.arrange(plan)

    def arrange(self, plan: Sequence[Sequence[nn.Parameter]]) -> None:
        """Make the buckets of this plan."""
        self.plan, self._buckets = plan, [PassingBucket(bucket, self._cut) for bucket in plan]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self.reset()

    def reset(self) -> None:
        """A new pass: every gradient is missing."""
        for bucket in self._buckets:
            bucket.flat, bucket.missing = None, set(bucket.parameters)
        self._sent, self._travelling = 0, None
        self._rows: dict[nn.Parameter, torch.Tensor] = {}

    def hold(self, parameter: nn.Parameter) -> None:
        """Its gradient waits for a later pass, in `.grad`, whole."""

    def add(self, parameter: nn.Parameter) -> None:
        """Its gradient is complete, or it has none, which counts as zero. The full buckets leave,
        each when the one before it has arrived."""
        _set_aside(self._cut.kept, parameter)  # if this pass has left it out
        bucket = self._bucket_of[parameter]
        bucket.take(parameter, self.scale)
        bucket.missing.discard(parameter)
        while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
            self.wait()
            self._travelling = self._buckets[self._sent]
            self._travelling.leave()
            self._sent += 1

    def wait(self) -> None:
        """Until the last one has come back."""
        if self._travelling is not None:
            self._rows |= self._travelling.arrive()
        self._travelling = None

    def give(self, used: Iterable[nn.Parameter]) -> None:
        """These have a gradient on one rank at least: its mean is added to their `.grad`."""
        for parameter in used:
            rows, kept = self._rows[parameter], self._cut.kept.pop(parameter, None)
            if kept is not None:
                rows = kept.to_local().add_(rows)
            parameter.grad = self._cut.whole(rows, like=parameter)


def _set_aside(kept: dict[nn.Parameter, Any], parameter: nn.Parameter, *_: Any) -> None:
    if hasattr(parameter.grad, "placements"):
        kept[parameter], parameter.grad = parameter.grad, None
    elif parameter.grad is None:
        kept.pop(parameter, None)  # the user has done with it


class ShardedDataParallel(DistributedDataParallel):
    """Trains replicas of `module` whose gradients and optimizer states are shared out. ZeRO, stage
    2. Lesson: zero.

        optimizer = md.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
        model = md.ShardedDataParallel(model, optimizer)

    Train as with `DistributedDataParallel`, with this optimizer. When `backward()` returns, each
    `.grad` is a DTensor: of the mean gradient this rank has its rows, and no more. So
    torch.nn.utils.clip_grad_norm_ takes the norm of the whole, and scales the rows. Passes within
    `no_sync` leave whole gradients, for the next pass outside to average. After FairScale's
    ShardedDDP.

    optimizer: a `ZeroRedundancyOptimizer` of all parameters of the module that are trained. The
        buckets and the group are its own.
    arguments: `find_unused_parameters` and `broadcast_buffers` of `DistributedDataParallel`.

    Raises TypeError for another optimizer; all else as `DistributedDataParallel` does.

    Limits: a parameter that the optimizer has not is not trained; `md.watch` finds this.
    """

    def __init__(
        self, module: nn.Module, optimizer: ZeroRedundancyOptimizer, **arguments: Any
    ) -> None:
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            raise TypeError(
                "ShardedDataParallel needs a ZeroRedundancyOptimizer, which has the rows, not "
                f"{type(optimizer).__name__}"
            )
        self._make_buckets = lambda plan, _: ShardBuckets(plan, optimizer.cut)
        cap, group = optimizer.bucket_cap_mb, optimizer.process_group
        super().__init__(module, process_group=group, bucket_cap_mb=cap, **arguments)

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Raises: a hook averages whole gradients, and here a rank gets its rows."""
        raise NotImplementedError("ShardedDataParallel has no communication hooks")
