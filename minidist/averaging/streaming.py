"""Streaming DiLoCo: one fragment after the other, while training goes on
(lesson: beyond_gradients)."""

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from minidist.averaging.averaging_optimizer import is_count
from minidist.averaging.diloco import DiLoCo, nesterov
from minidist.averaging.fragment import Outer


class StreamingDiLoCo(DiLoCo):
    """DiLoCo whose meetings are spread over the period: each fragment of the model has its own, and
    its message travels during the steps that follow.

        optimizer = md.averaging.StreamingDiLoCo(optimizer, period=50, fragments=4, delay=5)

    A period moves as many bytes as DiLoCo's, but not at once: the largest message is a fragment's,
    and it has the time of `delay` steps to arrive before anybody waits for it.

    fragments: consecutive parameters, cut so that each has about as many bytes. Fragment f meets
        (f + 1) period / fragments steps after the start, and every period from there on.
    delay: steps from sending to receiving, below the period; 0 waits at once.
    mix: a rank has trained on meanwhile. It keeps so much of its own parameters, from 0 to 1
        (the paper's α); the rest is the anchor. Above 0, replicas are never wholly equal.

    With one fragment, delay 0 and mix 0 it is `DiLoCo`. The paper also sends numbers of 4 bits;
    here they have the parameters' dtype. Douillard et al. 2025, "Streaming DiLoCo with overlapping
    communication", arXiv 2501.18512. Lesson: beyond_gradients.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        period: int,
        fragments: int = 4,
        delay: int = 1,
        mix: float = 0.5,
        outer: Outer = nesterov,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.count, self.delay, self.mix = fragments, delay, mix
        super().__init__(
            optimizer, period, outer, process_group, fragments=fragments, delay=delay, mix=mix
        )

    def parts(self) -> list[list[nn.Parameter]]:
        """Consecutive parameters, about as many bytes in each fragment. Raises ValueError for
        arguments that make no sense."""
        if not is_count(self.count) or not 1 <= self.count <= len(self.parameters):
            raise ValueError(
                f"StreamingDiLoCo: {len(self.parameters)} parameters make 1 to "
                f"{len(self.parameters)} fragments, not {self.count!r}"
            )
        if not is_count(self.delay) or not 0 <= self.delay < self.period or not 0 <= self.mix <= 1:
            raise ValueError(
                f"StreamingDiLoCo: delay is 0 to {self.period - 1} steps and mix 0 to 1, not "
                f"{self.delay!r} and {self.mix!r}"
            )
        parts: list[list[nn.Parameter]] = [[]]
        whole, done = sum(p.nbytes for p in self.parameters), 0
        for left, parameter in zip(
            range(len(self.parameters), 0, -1), self.parameters, strict=True
        ):
            missing = self.count - len(parts)
            # Where its middle lies beyond the end of this fragment; or no parameter is to spare.
            beyond = (done + parameter.nbytes / 2) * self.count >= whole * len(parts)
            if parts[-1] and missing and (beyond or left == missing):
                parts.append([])
            parts[-1].append(parameter)
            done += parameter.nbytes
        return parts

    def after_step(self) -> None:
        """Some fragments send, others receive what they have sent `delay` steps before."""
        for number, fragment in enumerate(self.fragments, start=1):
            first = number * self.period // self.count
            since = (self.steps - first) % self.period
            if since == 0 and self.steps >= max(first, 1):
                fragment.send()
            if since == self.delay and fragment.travelling:
                fragment.receive(self.mix)
