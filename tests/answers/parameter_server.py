"""Answers to the puzzles and the exercise of the lesson parameter_server."""

import torch

from minidist.course.checks import parameter_server as check


class ByCounts:
    def __init__(self, parameters, optimizer, trainers, bound):
        self.updates, self.bound = 0, bound
        self.parameters, self.optimizer = list(parameters), optimizer
        self.pushes = dict.fromkeys(trainers, 0)

    def push(self, trainer, pulled_at, gradients):
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.updates += 1
        self.pushes[trainer] += 1
        return self.updates - 1 - pulled_at

    def may_go_on(self, trainer):
        return self.pushes[trainer] - min(self.pushes.values()) <= self.bound

    def leave(self, trainer):
        del self.pushes[trainer]


class ByAList:
    """Notes each push, and who has left."""

    def __init__(self, parameters, optimizer, trainers, bound):
        self.parameters, self.optimizer, self.trainers = parameters, optimizer, set(trainers)
        self.bound, self.pushed_by, self.updates = bound, [], 0

    def push(self, trainer, pulled_at, gradients):
        late = len(self.pushed_by) - pulled_at
        self.optimizer.zero_grad()
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.pushed_by.append(trainer)
        self.updates = len(self.pushed_by)
        return late

    def may_go_on(self, trainer):
        mine = self.pushed_by.count(trainer)
        return all(mine - self.pushed_by.count(other) <= self.bound for other in self.trainers)

    def leave(self, trainer):
        self.trainers.remove(trainer)


class Less(ByCounts):
    def may_go_on(self, trainer):
        return self.pushes[trainer] - min(self.pushes.values()) < self.bound


class OfTheFastest(ByCounts):
    def may_go_on(self, trainer):
        return max(self.pushes.values()) - self.pushes[trainer] <= self.bound


class NobodyLeaves(ByCounts):
    def leave(self, trainer):
        pass


class CountsItself(ByCounts):
    def push(self, trainer, pulled_at, gradients):
        return super().push(trainer, pulled_at, gradients) + 1


class OwnPushes(ByCounts):
    """Staleness by its own pushes."""

    def push(self, trainer, pulled_at, gradients):
        super().push(trainer, pulled_at, gradients)
        return self.pushes[trainer] - 1


class PlainSteps(ByCounts):
    """Without the optimizer's momentum."""

    def push(self, trainer, pulled_at, gradients):
        with torch.no_grad():
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter -= 0.1 * gradient
        self.updates += 1
        self.pushes[trainer] += 1
        return self.updates - 1 - pulled_at


class AddsUp(ByCounts):
    """Gradients pile up."""

    def push(self, trainer, pulled_at, gradients):
        summed = [
            gradient if parameter.grad is None else parameter.grad + gradient
            for parameter, gradient in zip(self.parameters, gradients, strict=True)
        ]
        return super().push(trainer, pulled_at, summed)


class WaitsForTheRest(ByCounts):
    """Holds the gradient back when its trainer is too far ahead."""

    def push(self, trainer, pulled_at, gradients):
        if not self.may_go_on(trainer):
            return 0
        return super().push(trainer, pulled_at, gradients)

    def may_go_on(self, trainer):
        return True


ANSWERS = {
    check.slow_one: ([9, 9.0], [3, 10, 12, 2, "9"]),
    check.bounded: ([3], [9, 6, 2, 15, 0, "3"]),
    check.server: (
        [ByCounts, ByAList],
        [
            Less,
            OfTheFastest,
            NobodyLeaves,
            CountsItself,
            OwnPushes,
            PlainSteps,
            AddsUp,
            WaitsForTheRest,
        ],
    ),
}
