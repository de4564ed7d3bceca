"""The puzzles and the exercise of the lesson distributed_data_parallel."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minidist.course import zoo
from minidist.course.checks.verdict import NotYet, check, on_ranks, puzzle, ranks, same, shown
from minidist.instruments.link import Link
from minidist.instruments.measure import record

SLOW = Link(gbps=10, latency_us=20_000)  # each message travels for 20 ms, and so can be seen to
LAYERS, WHOLE = 6, 6 * 65 * 64 * 4  # of the model, and the bytes of its gradients
LEAGUE = 10, 5, 48  # ms: to compute a layer's gradients, a message's latency, for all bytes


last_bucket = puzzle(__name__, "last_bucket")
tied_weights = puzzle(__name__, "tied_weights")


@check
def overlaps(answer: object) -> float:
    """A wrapper: replicas begin with rank 0's weights, `backward()` leaves the mean gradients, and
    these travel while backward computes. The score: its step on a link of `LEAGUE`."""
    _require_right(answer)
    shares, sent, messages = zip(
        *on_ranks(_overlap, answer, world_size=2, backend="shm", link=SLOW), strict=True
    )
    share = min(shares)
    if max(sent) > 1.5:  # what travels early may then be something else
        raise NotYet(
            f"the gradients are right, but a step sends {max(sent):.1f} times their bytes. Send "
            "each gradient once."
        )
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
    return max(map(step_ms, messages))


def step_ms(messages: list[tuple[int, int]]) -> float:
    """When the last message of a step has come, by the numbers of `LEAGUE`. messages: after how
    many layers each is sent, and its bytes. One goes after the other."""
    layer, latency, whole = LEAGUE
    free = 0.0
    for layers, nbytes in messages:
        free = max(free, layers * layer) + latency + whole * nbytes / WHOLE
    return max(free, LAYERS * layer)


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
    if not same(model.parameters(), single.parameters()):
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
    if same(ours, wanted):
        return ""
    if same(ours, [world_size * gradient for gradient in wanted]):
        return "has the sum of the gradients, not the mean"
    right = sum(same([a], [b]) for a, b in zip(ours, wanted, strict=True))
    return f"has the mean gradient in {right} of {len(wanted)} parameters"


class _Marked(nn.Module):
    """Six layers. It notes when backward comes by between two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(LAYERS))
        self.times: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x.view_as(x)
            x.register_hook(self.mark)
            x = layer(x)
        return x

    def mark(self, _: torch.Tensor) -> None:
        time.sleep(0.005)  # to compute takes time, too
        self.times.append(time.perf_counter())


def _overlap(answer: Callable[..., Any]) -> tuple[float, float, list[tuple[int, int]]]:
    """For each byte of gradients: the bytes that were on their way at a time when backward came by,
    and all that were sent. And the messages of the last step, as `step_ms` takes them."""
    model = _Marked()
    wrapped = answer(model)
    steps = 3
    with record.observed() as events:
        for _ in range(steps):
            started = time.perf_counter()
            wrapped(torch.ones(4, 64, requires_grad=True)).sum().backward()
    sent = [e for e in events if e.scope is None and not e.control and e.kind != "received"]
    met = [e for e in sent if e.end and any(e.start < moment < e.end for moment in model.times)]
    # What a layer's hook sends comes before the mark that follows the layer.
    layers = [(sum(started < t < e.start for t in model.times), e) for e in sent]
    last = [(min(n + 1, LAYERS), e.nbytes) for n, e in layers if e.start > started]
    whole = steps * WHOLE
    return sum(e.nbytes for e in met) / whole, sum(e.nbytes for e in sent) / whole, last
