"""The puzzles and the exercise of the lesson distributed_data_parallel."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minidist.course import zoo
from minidist.course.checks.verdict import NotYet, check, hints, number, on_ranks, ranks, shown
from minidist.instruments.link import Link
from minidist.instruments.measure import record
from minidist.instruments.parity import relative_difference

SLOW = Link(gbps=10, latency_us=20_000)  # each message travels for 20 ms, and so can be seen to


@check
@hints(
    "It is the first prediction of the lesson, for another network: the bytes of all "
    "gradients, times a factor of the ring.",
    "There are as many gradients as parameters. How many megabytes are they, in float32?",
    "Multiply these megabytes by 2(N − 1)/N, for eight ranks.",
)
def bytes_of_a_step(answer: object) -> str:
    """MB that each of 8 GPUs sends in a step: 25 million parameters, float32, by a ring."""
    number(
        answer,
        175,
        "MB",
        {
            100: "those are the gradients; a ring sends 2 (N - 1)/N of them",
            87.5: "a ring goes round twice: sums, then results",
            200: "2 (N - 1)/N is a little less than 2",
            1400: "that is what all 8 GPUs send together",
            43.75: "a number in float32 has 4 bytes",
            175e6: "give MB",
        },
    )
    return "2 × 7/8 × 100 MB."


@check
@hints(
    'Draw it as the timelines under "See it" do: a row for backward with the moments when '
    "buckets are full, and a row for the messages.",
    "When does the first bucket leave? While it travels, the next one becomes full. Does "
    "the line ever stand idle after that?",
    "Add the time until the first bucket is full, and the travels of all six, one after another.",
)
def last_bucket(answer: object) -> str:
    """ms until the last of 6 buckets is there: one is full every 10 ms, each travels for 15 ms."""
    number(
        answer,
        100,
        "ms",
        {
            150: "that is 60 ms of backward and then 90 ms of travel; some of it overlaps",
            75: "one bucket travels at a time, so the last one has to wait",
            90: "the first bucket is full after 10 ms, not at once",
            0.1: "give milliseconds",
        },
    )
    return "the first leaves after 10 ms, and from then on the line is busy for 6 × 15 ms."


@check
@hints(
    "`TinyDDP` above does nearly all of it, but somebody must call its `finish`. Read what "
    "it does when it is made, and what its hook does.",
    "Here backward may not end before every gradient is the mean. A hook runs within "
    "backward. So what if the hook did not return before its message has arrived?",
    "In `__init__` do as `TinyDDP` does. The simplest hook all_reduces the gradient of its "
    "parameter, waits for it, and divides by the number of ranks. That is slow, and right: "
    "nothing is left to finish.",
)
def averages(answer: object) -> str:
    """A wrapper: replicas begin with rank 0's weights, `backward()` leaves the mean gradients."""
    _require_right(answer)
    return "the gradients of one process, on 2 and 3 ranks."


@check
@hints(
    "`TinyDDP` overlaps: its hook starts an all_reduce and returns at once. What is missing"
    " is somebody who calls `finish`.",
    "In each backward pass the hook runs once for every parameter. So count the gradients "
    "that have arrived: one call of the hook sees that all of them are there.",
    "That call does what `finish` did: it waits for all messages, and makes sure that each "
    "`.grad` is the mean. Then it empties the list and the count, for the next step.",
)
def overlaps(answer: object) -> str:
    """The same, and gradients travel while backward computes."""
    _require_right(answer)
    share = min(on_ranks(_overlap, answer, world_size=2, backend="shm", link=SLOW))
    if share == 0:
        raise NotYet(
            "the gradients are right, but nothing travels while backward computes. Start a message "
            "in a hook, and wait for it in a later one."
        )
    if share < 0.4:  # those that the last layer's hook sends and waits for do not overlap
        raise NotYet(
            f"the gradients are right, but only {100 * share:.0f}% of their bytes travel while "
            "backward computes."
        )
    return "gradients travel while backward computes."


def _require_right(answer: Any) -> None:
    if not callable(answer):
        raise NotYet(f"give the class itself, MyDDP, not {shown(answer)}.")
    for world_size in (2, 3):
        results = on_ranks(_training, answer, world_size=world_size)
        # A rank that began elsewhere is the cause of what the others say.
        for rank, wrong in sorted(enumerate(results), key=lambda said: "begins" not in said[1]):
            if wrong:
                raise NotYet(f"on {ranks(world_size)}, rank {rank} {wrong}.")


def _training(answer: Callable[..., Any]) -> str:
    """What is wrong on this rank, if anything: the first of it. It goes on, as others wait."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)  # (zoo.digits is slow to import)
    images = torch.randn(96, 64, generator=generator, dtype=torch.float64)
    labels = torch.randint(10, (96,), generator=generator)
    model = zoo.mlp(64, 16, 16, 10, dtype=torch.float64, seed=rank)
    single = zoo.mlp(64, 16, 16, 10, dtype=torch.float64, seed=0)
    wrapped, wrong = answer(model), list[str]()
    if not isinstance(wrapped, nn.Module):
        return f"gets {shown(wrapped)} from MyDDP(model), not a module"
    if {*model.parameters()} - {*wrapped.parameters()}:
        return "misses the parameters of the model: self.module = module"
    if not _same(model.parameters(), single.parameters()):
        wrong.append("begins with weights of its own, not with those of rank 0")
    for step in range(4):
        rows = slice(8 * step * world_size, 8 * (step + 1) * world_size)
        x, y = images[rows], labels[rows]
        F.cross_entropy(single(x), y).backward()
        _backward(wrapped, x[rank::world_size], y[rank::world_size], zero_grad_last=step > 1)
        if complaint := _complaint(model, single, world_size):
            between = " if zero_grad() stands between forward and backward" if step > 1 else ""
            wrong.append(f"{complaint}, in step {step + 1}{between}")
        with torch.no_grad():
            for each in (*model.parameters(), *single.parameters()):
                each.sub_(0 if each.grad is None else 0.1 * each.grad)
        single.zero_grad()
    return wrong[0] if wrong else ""


def _backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor, zero_grad_last: bool) -> None:
    if not zero_grad_last:
        model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    if zero_grad_last:
        model.zero_grad()
    loss.backward()


def _complaint(model: nn.Module, single: nn.Module, world_size: int) -> str:
    ours = [p.grad for p in model.parameters() if p.grad is not None]
    wanted = [p.grad for p in single.parameters() if p.grad is not None]
    if len(ours) < len(wanted):
        return f"has a gradient for {len(ours)} of {len(wanted)} parameters"
    if _same(ours, wanted):
        return ""
    if _same(ours, [world_size * gradient for gradient in wanted]):
        return "has the sum of the gradients, not the mean"
    if _same(ours, [gradient / world_size for gradient in wanted]):
        return "has divided twice by the number of ranks"
    right = sum(_same([a], [b]) for a, b in zip(ours, wanted, strict=True))
    return f"has the mean gradient in {right} of {len(wanted)} parameters"


def _same(ours: Any, wanted: Any) -> bool:
    pairs = zip(ours, wanted, strict=True)
    return all(a.shape == b.shape and relative_difference(a, b) < 1e-10 for a, b in pairs)


class _Mark(torch.autograd.Function):
    """The identity, which notes when backward comes by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, times: list[float]) -> torch.Tensor:
        ctx.times = times
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(0.005)  # to compute takes time, too
        ctx.times.append(time.perf_counter())
        return gradients[0], None


class _Marked(nn.Module):
    """Six layers, with a mark between each two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.times: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(_Mark.apply(x, self.times))
        return x


def _overlap(answer: Callable[..., Any]) -> float:
    """Bytes that were on their way at a time when backward came by, for each byte of gradients."""
    model = _Marked()
    wrapped = answer(model)
    steps = 3
    with record.observed() as events:
        for _ in range(steps):
            wrapped(torch.ones(4, 64, requires_grad=True)).sum().backward()
    met = sum(
        event.nbytes
        for event in events
        if event.scope is None and not event.control and event.end is not None
        if any(event.start < moment < event.end for moment in model.times)
    )
    return met / (steps * sum(parameter.nbytes for parameter in model.parameters()))
