"""Along the axis `data`: the mean of the replicas' gradients, once a step."""

from typing import Any

import torch.distributed as dist
from torch import nn

from minidist.distributed_data_parallel.buckets import BUCKET_CAP_MB, Bucket, assign
from minidist.distributed_data_parallel.reducer import on_any_rank
from minidist.rank import device


class MeanGradients:
    """Gives the ranks of `group` the mean of the gradients of what `module` trains.

    A hook of DistributedDataParallel would fire at every micro-batch, before the gradient is
    complete, and before the two ends of a tie are added up: the buckets leave at the end.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        trained = [p for p in reversed(list(module.parameters())) if p.requires_grad]
        plan = assign(trained, BUCKET_CAP_MB * 2**20) if group.size() > 1 else []
        self._buckets = [
            Bucket(number, parameters, number == len(plan) - 1, group)
            for number, parameters in enumerate(plan)
        ]
        self._parameters = [parameter for parameters in plan for parameter in parameters]

    def some_unused(self) -> bool:
        """Whether a parameter has no gradient on this rank."""
        return not all(self._used())

    def _used(self) -> list[bool]:
        return [parameter.grad is not None for parameter in self._parameters]

    def take(self, some_unused: bool) -> None:
        """All ranks of the group call this. `some_unused`: on one of them at least. Without
        gradient on some ranks, a parameter counts there as zero; on all, its `.grad` stays None."""
        used = self._used()
        works: list[Any] = []
        for bucket in self._buckets:
            for slot in range(len(bucket.parameters())):
                bucket.hold(slot, 1 / self._group.size())
            works.append(dist.all_reduce(bucket.buffer(), group=self._group, async_op=True))
        for work in works:
            work.wait()
        if some_unused:
            used = on_any_rank(used, self._group, device())
            views = [view for bucket in self._buckets for view in bucket.gradients()]
            for parameter, view, any_used in zip(self._parameters, views, used, strict=True):
                if any_used:  # then this rank takes the step too
                    parameter.grad = view
