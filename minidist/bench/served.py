"""Training with a parameter server, for the benchmark of averaging (lesson: beyond_gradients).

Rank 0 is the server, all others train. Remote calls do not go through the emulated network. So a
trainer sleeps as long as its two messages, the gradient and the weights, take on a line of their
own. (Where all lines of the server are one cable, as between machines, it takes longer.) An
asynchronous server steps once for each trainer; so its learning rate is divided by their number.
"""

import time
from functools import partial
from itertools import chain
from statistics import mean
from typing import Any

import torch.distributed as dist
from torch import nn

import minidist as md
from minidist.bench.tasks import PERIOD, Outcome, Task, sgd, train
from minidist.bench.turns import Times, in_turns
from minidist.parameter_server import ServedOptimizer
from minidist.runtime import Pool

SERVERS: dict[str, dict[str, Any]] = {
    "server, synchronous": {"synchronous": True},
    "server, asynchronous": {"synchronous": False},
    "server, at most 2 ahead": {"synchronous": False, "bound": 2},
}


class OverTheLink:
    """A trainer's optimizer, whose gradients and weights take their time."""

    def __init__(self, optimizer: ServedOptimizer) -> None:
        self.optimizer, link = optimizer, md.Link.here()
        nbytes = sum(p.nbytes for p in optimizer.parameters)
        self.seconds = link.seconds(nbytes) if link else 0.0
        self.zero_grad = optimizer.zero_grad

    def step(self) -> None:
        """There, and back again."""
        time.sleep(self.seconds)
        self.optimizer.step()
        time.sleep(self.seconds)


def outcomes(pool: Pool, task: Task, steps: int) -> dict[str, Outcome]:
    """Of each way with a server: what that sends, and the loss after `steps` steps of a trainer."""
    found = {}
    for name, options in SERVERS.items():
        served, *_ = pool(train_here, task, options, steps)
        model = task.model()
        model.load_state_dict(served.weights, strict=False)  # tied weights have two names
        answers = pool.world_size - 1  # in a step: the weights, for each trainer
        sent = answers * sum(weight.nbytes for weight in served.weights.values())
        found[name] = Outcome(sent, task.loss(model))
    return found


def measure(pool: Pool, task: Task, rounds: int) -> Times:
    """Seconds a step of each trainer, in turns."""
    subjects = {name: partial(_seconds, pool, task, options) for name, options in SERVERS.items()}
    return in_turns(subjects, rounds, 1)


def _seconds(pool: Pool, task: Task, options: dict[str, Any]) -> float:
    _, *seconds = pool(train_here, task, options, PERIOD)
    return mean(seconds)


def train_here(task: Task, options: dict[str, Any], steps: int) -> Any:
    """On a rank: a trainer returns seconds a step."""

    trainers = dist.get_world_size() - 1

    def loop(model: nn.Module, optimizer: ServedOptimizer) -> float:
        batches = task.batches(dist.get_rank() - 1, trainers)
        batches = chain([next(batches)], batches)  # the data are read before the time begins
        return train(model, OverTheLink(optimizer), batches, steps)

    step = partial(sgd, steps=1 if options["synchronous"] else trainers)
    return md.parameter_server.train(task.model, step, loop, **options)
