"""Training by DDP, by averaging now and then, and in few bits: bytes, seconds, loss.

Each way trains the same models, of digits and of text, from the same batches by plain SGD, on a
fast and on a slow link. Bytes are those of a step, of the rank that sends most, by the cost of each
collective. The loss is that of examples which nobody has trained on, under the mean of the
replicas, after STEPS steps. "Times faster" is DDP / this way. DiLoCo has momentum in its outer
steps: so its loss says how far it went, and not what it saved.
Lesson: beyond_gradients
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import minidist as md
from minidist.averaging import DiLoCo, LocalSGD, LowBitState, average, int8_hook, one_bit_hook
from minidist.collectives import cost
from minidist.collectives.cost import ALGORITHMS
from minidist.instruments.bench.rows import Row, draw, show
from minidist.instruments.bench.tasks import PERIOD, TASKS, Outcome, Task, sgd, train
from minidist.instruments.bench.training import Wrapped
from minidist.instruments.bench.turns import Times, in_turns
from minidist.machine.runtime import Pool

RANKS = 4
LINKS = {
    "fast": md.Link(gbps=10, latency_us=20),
    "slow": md.Link(gbps=0.02, latency_us=1000),
}
STEPS = 192  # of the training whose loss counts

Optimizer = torch.optim.Optimizer
Ways = dict[str, Callable[[nn.Module, Optimizer], Wrapped]]


def by_ddp(
    model: nn.Module,
    optimizer: Optimizer,
    hook: Any = None,
    state: Callable[[], Any] | None = None,
) -> Wrapped:
    """Every gradient of every step, as a hook sends it."""
    ddp = md.DistributedDataParallel(model)
    if state is not None:
        ddp.register_comm_hook(state(), hook)
    return ddp, optimizer


def by_averaging(model: nn.Module, optimizer: Optimizer, wrap: Callable[..., Optimizer]) -> Wrapped:
    """No gradient; parameters, now and then."""
    return model, wrap(optimizer)


WAYS: Ways = {
    "DDP": by_ddp,
    **{
        f"local SGD, every {period}": partial(by_averaging, wrap=partial(LocalSGD, period=period))
        for period in (2, 4, 8, 16)
    },
    "DiLoCo, every 16": partial(by_averaging, wrap=partial(DiLoCo, period=PERIOD)),
    "int8": partial(by_ddp, hook=int8_hook, state=LowBitState),
    "1 bit": partial(by_ddp, hook=one_bit_hook, state=LowBitState),
    "torch's PowerSGD, rank 2": partial(
        by_ddp, hook=powerSGD_hook, state=partial(PowerSGDState, None, 2, start_powerSGD_iter=2)
    ),
}


def run(rounds: int, picture: Path) -> list[Row]:
    """Train each task in each way once, for bytes and loss; then time stretches of it, by link."""
    rows: list[Row] = []
    for name, task in TASKS.items():
        outcomes: dict[str, Outcome] = {}
        taken: dict[str, Times] = {}
        for where, link in LINKS.items():
            with md.ranks(RANKS, "shm", link=link) as pool:
                if not taken:
                    outcomes |= pool(outcomes_here, task, WAYS, STEPS)[0]
                taken[where] = measure(pool, task, WAYS, rounds)
        found = [
            times.row(f"{name}, {where} link: {way}", way, "DDP")
            for where, times in taken.items()
            for way in outcomes
            if way != "DDP"
        ]
        show(f"{name}: a step on {RANKS} ranks, {task.parameters():,} parameters", found)
        table(outcomes, taken)
        rows += found
    draw(f"averaging: a step on {RANKS} ranks", rows, picture)
    return rows


def measure(pool: Pool, task: Task, ways: Ways, rounds: int) -> Times:
    """Seconds a step of each way, over a whole number of periods, in turns."""
    times: Times = pool(times_here, task, ways, rounds, os.getpid())[0]
    return times


def table(outcomes: dict[str, Outcome], taken: dict[str, Times]) -> None:
    """Print bytes, times and loss of each way."""
    heads = ["bytes a step", *(f"ms, {link} link" for link in taken), "loss"]
    print("\n" + "  ".join([f"{'':26}", *(head.rjust(13) for head in heads)]))
    for way, (nbytes, loss) in outcomes.items():
        times = [f"{1e3 * median(seconds[way]):13.3g}" for seconds in taken.values()]
        print("  ".join([f"{way:26}", f"{nbytes:13,.0f}", *times, f"{loss:13.3f}"]))


class Training:
    """A way to train, from the first batch on."""

    def __init__(self, task: Task, wrap: Callable[[nn.Module, Optimizer], Wrapped]) -> None:
        self.task, self.bare = task, task.model()
        self.model, self.optimizer = wrap(self.bare, sgd(self.bare.parameters()))
        self.batches = task.batches(dist.get_rank(), dist.get_world_size())

    def go(self, steps: int) -> float:
        """So many steps more; returns seconds a step."""
        dist.barrier()
        return train(self.model, self.optimizer, self.batches, steps)

    def loss(self) -> float:
        """Of the mean of the replicas, which they become."""
        average(self.bare.parameters())
        return self.task.loss(self.bare)


def outcomes_here(task: Task, ways: Ways, steps: int) -> dict[str, Outcome]:
    """On a rank: of each way, bytes a step in the second period, and the loss after `steps`."""
    found = {}
    for name, wrap in ways.items():
        training = Training(task, wrap)
        training.go(PERIOD)
        with md.measure.TrafficCounter() as traffic:
            training.go(PERIOD)
        training.go(steps - 2 * PERIOD)
        found[name] = Outcome(sent_bytes(traffic) / PERIOD, training.loss())
    return found


def sent_bytes(traffic: md.measure.TrafficCounter) -> float:
    """Bytes that a rank sends: its messages, and its part of each collective, by the formulas."""
    total = float(traffic.sent_bytes)
    for name, (_, nbytes) in traffic.calls.items():
        total += cost(name, ALGORITHMS[name][0], traffic.world_size, nbytes).nbytes
    return total


def times_here(task: Task, ways: Ways, rounds: int, root: int) -> Times:
    """The same on a rank."""
    trainings = {name: Training(task, wrap) for name, wrap in ways.items()}
    subjects = {name: partial(training.go, PERIOD) for name, training in trainings.items()}
    return in_turns(subjects, rounds, 1, root)
