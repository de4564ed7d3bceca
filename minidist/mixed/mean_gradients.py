"""Along the axis `data`: the mean of the replicas' gradients, once a step."""

from functools import cached_property
from itertools import compress

import torch.distributed as dist
from torch import nn

from minidist.common.agree import on_any_rank
from minidist.distributed_data_parallel.buckets import BUCKET_CAP_MB, Buckets, assign


class MeanGradients:
    """Gives the ranks of `group` the mean of the gradients of what `module` trains.

    A hook of DistributedDataParallel would fire at every micro-batch, before the gradient is
    complete, and before the two ends of a tie are added up: the buckets leave at the end.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        trained = [p for p in reversed(list(module.parameters())) if p.requires_grad]
        self._parameters = trained if group.size() > 1 else []

    @cached_property
    def _buckets(self) -> Buckets:  # when there are gradients to put into them
        return Buckets(assign(self._parameters, BUCKET_CAP_MB * 2**20), self._group)

    def some_unused(self) -> bool:
        """Whether a parameter has no gradient on this rank."""
        return not all(self._used())

    def _used(self) -> list[bool]:
        return [parameter.grad is not None for parameter in self._parameters]

    def take(self, some_unused: bool) -> None:
        """All ranks of the group call this. `some_unused`: on one of them at least. Without
        gradient on some ranks, a parameter counts there as zero; on all, its `.grad` stays None."""
        used = self._used()
        try:
            for parameter in self._parameters:
                self._buckets.add(parameter)
            self._buckets.wait()
        finally:
            self._buckets.reset()
        if some_unused:
            used = on_any_rank(used, self._group)
            self._buckets.give(compress(self._parameters, used))
