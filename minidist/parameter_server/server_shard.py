"""What a server holds, and when a trainer may go on (lesson: beyond_gradients)."""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.futures import Future

Gradients = list[torch.Tensor | None]


def share_out(sizes: Sequence[int], servers: int) -> list[int]:
    """Which server holds each parameter: the largest first, each to the server with the least.

    A parameter is not cut. Raises ValueError if there are fewer parameters than servers.
    """
    if servers > len(sizes):
        raise ValueError(f"{servers} servers cannot share {len(sizes)} parameters")
    held, holder = [0] * servers, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        holder[index] = held.index(min(held))
        held[holder[index]] += sizes[index]
    return holder


class ServerShard:
    """Some parameters, their optimizer, and where each trainer is.

    trainers: their ranks. synchronous: step by the mean of all trainers' gradients, else by each as
    it comes. bound: an asynchronous trainer waits while it is more steps ahead of the slowest; None
    is never. What others call runs in threads of RPC, one at a time.
    """

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
        self.steps = dict.fromkeys(trainers, 0)  # of each trainer that is there
        self.version = 0  # updates so far
        self.staleness: list[int] = []  # of each gradient
        self.pushed_by: list[int] = []
        self.died: list[int] = []
        self.problem: Exception | None = None  # for which nobody can go on
        self.over = threading.Event()  # all trainers have left, or died
        self._lock = threading.Lock()
        self._pushed: dict[int, Gradients] = {}  # of a synchronous step that is not complete
        self._waiting: dict[int, Future[Any]] = {}
        self._leaving: dict[int, Future[list[int]]] = {}

    def pull(self) -> tuple[int, list[torch.Tensor]]:
        """The number of updates, and the weights, which change while an answer is on its way."""
        with self._lock:
            return self._weights()

    def push(self, trainer: int, version: int, gradients: Gradients) -> Future[Any]:
        """Take a gradient at the weights of `version`. The answer is what `pull` gives, as soon as
        the trainer may go on; or the error for which it may not."""
        with self._lock:
            answer = self._waiting[trainer] = Future()
            self.steps[trainer] += 1
            self.staleness.append(self.version - version)
            self.pushed_by.append(trainer)
            if self.synchronous:
                self._pushed[trainer] = gradients
                self._complete()
            else:
                self._step(gradients)
            self._release()
        return answer

    def leave(self, trainer: int) -> Future[list[int]]:
        """It has no more gradients. The answer, when all have left or died, is who has died."""
        with self._lock:
            answer = self._leaving[trainer] = Future()
            self._without(trainer)
        return answer

    def lost(self, trainer: int) -> None:
        """Its process has ended: in order, if it had its answer to `leave`."""
        with self._lock:
            if trainer in self.steps:
                self.died.append(trainer)
                if self.synchronous and not self.problem:
                    # Its own error is the cause, and may be reported later than this one.
                    self.problem = ConnectionError(
                        f"Connection closed by the trainer on rank {trainer} after "
                        f"{self.steps[trainer]} steps: it has died, or raised an error, and a "
                        "synchronous server needs its gradients"
                    )
                self._without(trainer)
            elif trainer in self._leaving:  # all its gradients are here, so nobody lacks it
                self.died.append(trainer)

    # ---- within the lock -----------------------------------------------------------------------

    def _without(self, trainer: int) -> None:
        """Go on without one that has left or died, and whom nobody waits for."""
        steps = self.steps.pop(trainer)
        if self._pushed and not self.problem:
            self._too_few(trainer, steps)
        self._release()
        if not self.steps:
            for answer in self._leaving.values():
                answer.set_result(self.died)
            self._leaving = {}
            self.over.set()

    def _complete(self) -> None:
        """Step by the mean, added up in the order of ranks, once all have pushed."""
        if self._leaving and not self.problem:
            self._too_few(next(iter(self._leaving)), self.version)
        if self.problem or self._pushed.keys() != self.steps.keys():
            return
        by_rank = [self._pushed[trainer] for trainer in sorted(self._pushed)]
        self._pushed = {}
        self._step([_mean(gradients) for gradients in zip(*by_rank, strict=True)])

    def _too_few(self, trainer: int, steps: int) -> None:
        self.problem = RuntimeError(
            f"the trainer on rank {trainer} has left after {steps} steps, and others go on: "
            "a synchronous server needs as many batches on every trainer"
        )

    def _step(self, gradients: Gradients) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.version += 1

    def _release(self) -> None:
        """Answer each trainer that may go on."""
        for trainer in list(self._waiting):
            if self.problem or self._may_go_on(trainer):
                self._waiting.pop(trainer).set_result(self.problem or self._weights())

    def _may_go_on(self, trainer: int) -> bool:
        if trainer not in self.steps:
            return True
        if self.synchronous:
            return trainer not in self._pushed
        ahead = self.steps[trainer] - min(self.steps.values())
        return self.bound is None or ahead <= self.bound

    def _weights(self) -> tuple[int, list[torch.Tensor]]:
        return self.version, [parameter.detach().clone() for parameter in self.parameters]


def _mean(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Of all trainers; who has none, of a parameter that its batch did not use, counts as zero."""
    there = [gradient for gradient in gradients if gradient is not None]
    return torch.stack(there).sum(0) / len(gradients) if there else None
