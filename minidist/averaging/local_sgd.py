"""Local SGD: the mean of the parameters, once in a period (lesson: beyond_gradients)."""

import torch.distributed as dist
from torch.optim import Optimizer

from minidist.averaging.averaging_optimizer import AveragingOptimizer
from minidist.averaging.flat_mean import average


class LocalSGD(AveragingOptimizer):
    """Every `period` steps the parameters become their mean over the ranks: one all_reduce of all
    of them. Between, nothing is sent.

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = md.averaging.LocalSGD(optimizer, period=8)

    warmup: the first so many steps average the gradients instead, and so are those of
        DistributedDataParallel: post-local SGD. The first period begins after them.

    With period 1 and SGD without momentum, training is that of DistributedDataParallel: the mean
    of x - η gᵣ is x - η times the mean of gᵣ. An optimizer's states are never averaged. See
    `AveragingOptimizer` for the rest. torch's PostLocalSGDOptimizer averages after the same steps
    if its averager has `warmup_steps=warmup + period - 1`.

    Stich 2018, arXiv 1805.09767; post-local: Lin et al. 2018, "Don't Use Large Mini-Batches, Use
    Local SGD", arXiv 1808.07217. Lesson: beyond_gradients.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        period: int,
        warmup: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(optimizer, period, process_group, warmup=warmup)
        self.warmup = warmup

    def before_step(self) -> None:
        """In the warm-up: the mean of the gradients. Raises RuntimeError where there is none."""
        if self.steps >= self.warmup:
            return
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if len(gradients) < len(self.parameters):
            raise RuntimeError(
                "LocalSGD averages all gradients in its warm-up, and a parameter has none"
            )
        average(gradients, self.process_group)

    def after_step(self) -> None:
        """At the end of a period: the mean of the parameters."""
        since = self.steps - self.warmup
        if since > 0 and since % self.period == 0:
            average(self.parameters, self.process_group)
