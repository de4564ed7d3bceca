"""What the server holds, and when a trainer may go on (lesson: parameter_server)."""

import threading
from collections.abc import Iterable, Sequence

import torch
from torch import nn

Gradients = list[torch.Tensor | None]
Weights = tuple[int, list[torch.Tensor]]  # how many updates they have had, and they


class Server:
    """The parameters, their optimizer, and where each trainer is.

    trainers: their ranks. synchronous: step by the mean of all trainers' gradients, else by each as
    it comes. bound: an asynchronous trainer waits while it is more steps ahead of the slowest; None
    is never. Each call of a trainer runs in a thread of its own here, and waits there.
    """

    here: "Server"  # the one on this rank, for those who call it

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        trainers: Iterable[int],
        synchronous: bool,
        bound: int | None,
    ) -> None:
        self.parameters, self.optimizer = list(parameters), optimizer
        self.synchronous, self.bound = synchronous, bound
        self.steps = dict.fromkeys(trainers, 0)  # of each trainer that has not left
        self.trainers = set(self.steps)
        self.version = 0  # updates so far
        self.staleness: list[int] = []  # of each gradient
        self.pushed_by: list[int] = []
        self.changed = threading.Condition()
        self._pushed: dict[int, Gradients] = {}  # of a synchronous step that is not complete

    def pull(self) -> Weights:
        """The number of updates, and copies of the weights."""
        with self.changed:
            return self._weights()

    def push(self, trainer: int, version: int, gradients: Gradients) -> Weights:
        """Take a gradient at the weights of `version`, and wait until the trainer may go on."""
        with self.changed:
            self.staleness.append(self.version - version)
            self.pushed_by.append(trainer)
            self.steps[trainer] += 1
            if not self.synchronous:
                self.step(gradients)
            else:
                self._pushed[trainer] = gradients
                if self._pushed.keys() == self.trainers:
                    by_rank = [self._pushed[rank] for rank in sorted(self.trainers)]
                    self.step([_mean(each) for each in zip(*by_rank, strict=True)])
                    self._pushed = {}
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.may_go_on(trainer))
            return self._weights()

    def leave(self, trainer: int) -> None:
        """It has no more gradients: nobody waits for it."""
        with self.changed:
            del self.steps[trainer]
            self.changed.notify_all()

    def may_go_on(self, trainer: int) -> bool:
        if not self.synchronous:
            ahead = self.steps[trainer] - min(self.steps.values())
            return self.bound is None or ahead <= self.bound
        if trainer in self._pushed and (left := self.trainers - self.steps.keys()):
            raise RuntimeError(f"ranks {left} have no more batches, and rank {trainer} has one")
        return trainer not in self._pushed

    def step(self, gradients: Gradients) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.version += 1

    def _weights(self) -> Weights:
        return self.version, [parameter.detach().clone() for parameter in self.parameters]


def _mean(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Of all trainers; who has none, of a parameter that its batch did not use, counts as zero."""
    there = [gradient for gradient in gradients if gradient is not None]
    return torch.stack(there).sum(0) / len(gradients) if there else None
