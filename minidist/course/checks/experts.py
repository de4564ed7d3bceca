"""The puzzles and the exercise of the lesson experts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from minidist.course.checks.verdict import (
    NotYet,
    check,
    function,
    puzzle,
    ranks,
    require_right,
    same,
)
from minidist.instruments.link import Link

WIDTH, EXPERTS = 256, 12
SOME = 1.1  # times the bytes of the rows: with them go counts, weights and numbers of experts


nodes_a_token = puzzle(__name__, "nodes_a_token")
router_gradient = puzzle(__name__, "router_gradient")


# ---- the exercise -----------------------------------------------------------------------------


class Layer(NamedTuple):
    """Where tokens come from and go to: `tokens[r]` of rank r, each with k experts, none of which
    is before the first."""

    tokens: tuple[int, ...]
    k: int
    first: int = 0


LAYERS = [Layer((9, 0), 4), Layer((9, 0, 5), 4), Layer((4, 2, 5, 3), 3, 9)]  # to the last rank


@check
def dispatch_once(answer: object) -> None:
    """`dispatch_once(x, weights, chosen, experts)`: y of this rank's tokens. x (N, C), weights and
    chosen (N, k); experts: this rank's own. Their gradients are the sum over all ranks' tokens."""
    for layer in LAYERS:
        size = len(layer.tokens)
        link = Link(100, 1)  # it counts what leaves a node, and here each rank is one
        trial = _trial, function(answer), layer
        results = require_right(*trial, world_size=size, of_rank=", ", nodes=size, link=link)
        _few(layer, *results[0][1:])


def _few(layer: Layer, nbytes: float, computed: float) -> None:
    """Refuse what sends or computes more rows than are needed."""
    size, naive, once = len(layer.tokens), 0, 0
    for rank in range(size):
        for token in _inputs(layer, rank)[2] // (EXPERTS // size):
            naive += int((token != rank).sum())
            once += len({*token.tolist()} - {rank})
    on = f"on {ranks(size)}, all is right, but"
    if computed > (chosen := sum(layer.tokens) * layer.k):
        raise NotYet(
            f"{on} the experts compute {computed:.0f} rows, and {chosen} have chosen them."
        )
    sent = nbytes / 8 / WIDTH
    if sent > 2 * once * SOME:
        ways = {2 * naive: "both ways", once + naive: "one way"}
        near = [way for rows, way in ways.items() if rows <= sent <= rows * SOME]
        why = f": {near[0]} there is a row for each expert of a token" if near else ""
        raise NotYet(
            f"{on} {sent:.0f} rows of {WIDTH} numbers leave the ranks, and {2 * once} suffice, "
            f"there and back{why}."
        )


def _trial(answer: Callable[..., Any], layer: Layer) -> tuple[str, float, float]:
    """What is wrong on this rank; of all ranks together, bytes that left one in forward, and rows
    that went through experts."""
    rank, size = dist.get_rank(), dist.get_world_size()
    n = EXPERTS // size
    mine = [_Expert(seed) for seed in range(rank * n, rank * n + n)]
    x, weights, chosen, dy = _inputs(layer, rank)
    dist.barrier()
    before = Link.sent_by_node(rank)
    y = answer(x, weights, chosen, nn.ModuleList(mine))
    dist.barrier()
    counts = torch.tensor([Link.sent_by_node(rank) - before, sum(expert.rows for expert in mine)])
    wrong = _not_an_output(y, x)
    fine = torch.tensor([not wrong]).int()
    dist.all_reduce(fine, dist.ReduceOp.MIN)  # else ranks wait for each other in backward
    dist.all_reduce(counts)
    if fine.item():
        y.backward(dy)
        wrong = _differs(y.detach(), (x.grad, weights.grad), mine, layer)
    return wrong, *counts.tolist()


class _Expert(nn.Module):
    """Counts the rows that it computes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(WIDTH, 8, dtype=torch.float64)
        self.down = nn.Linear(8, WIDTH, dtype=torch.float64)
        self.rows = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += len(x)
        done: torch.Tensor = self.down(nn.functional.gelu(self.up(x)))
        return done


def _inputs(layer: Layer, rank: int) -> tuple[torch.Tensor, ...]:
    """x, weights, chosen and the gradient of y, of this rank's tokens."""
    rows = layer.tokens[rank]
    draw = torch.Generator().manual_seed(100 + rank)
    x, dy = torch.randn(2, rows, WIDTH, generator=draw, dtype=torch.float64)
    scores = torch.randn(rows, EXPERTS - layer.first, generator=draw, dtype=torch.float64)
    weights, chosen = scores.softmax(-1).topk(layer.k)
    return x.requires_grad_(), weights.requires_grad_(), chosen + layer.first, dy


def _not_an_output(y: Any, x: torch.Tensor) -> str:
    if not torch.is_tensor(y):
        return "it does not return a tensor"
    if y.shape != x.shape or y.dtype != x.dtype:
        return f"y is {tuple(y.shape)} in {y.dtype}, and x is {tuple(x.shape)} in {x.dtype}"
    if not y.requires_grad:
        return "autograd cannot go back from y, and in backward the other ranks would wait"
    return ""


def _differs(y: torch.Tensor, grads: tuple[Any, Any], mine: list[_Expert], layer: Layer) -> str:
    """What is wrong with this rank's output and gradients, if anything."""
    rank, size = dist.get_rank(), dist.get_world_size()
    n = EXPERTS // size
    everybody = [_inputs(layer, other) for other in range(size)]
    experts = [_Expert(seed) for seed in range(EXPERTS)]
    outputs = []
    for x, weights, chosen, dy in everybody:
        every = torch.stack([expert(x) for expert in experts], 1)  # (N, E, C)
        gates = torch.zeros(len(x), EXPERTS).double().scatter(1, chosen, weights)  # (N, E)
        (gates[..., None] * every).sum(1).backward(dy)
        outputs.append((gates.detach().view(-1, size, n), every.detach()))
    gates, every = outputs[rank]

    def by(gates: torch.Tensor) -> torch.Tensor:
        return (gates.view(-1, EXPERTS, 1) * every).sum(1)

    if not same(y, by(gates)):
        own = torch.zeros(size, 1).double().index_fill(0, torch.tensor([rank]), 1)
        wrong_gates = {
            "lacks the weights of the experts": (gates > 0).double(),
            "has only what the experts of this rank add": gates * own,
            "has one expert of a rank where a token has chosen several": gates
            * (gates == gates.amax(2, True)),
        }
        near = [says for says, other in wrong_gates.items() if same(y, by(other))]
        return f"y {near[0] if near else 'is not that of one process'}"
    for name, found, leaf in zip(("x", "weights"), grads, everybody[rank], strict=False):
        if len(leaf) and (found is None or not found.any()):
            return f"no gradient reaches {name}: it travels without a function of autograd"
        if len(leaf) and not same(found, leaf.grad):
            return f"the gradient of {name} is not that of one process"
    for have, expert in zip(mine, experts[rank * n :], strict=False):
        for a, b in zip(have.parameters(), expert.parameters(), strict=True):
            if not same(torch.zeros_like(a) if a.grad is None else a.grad, b.grad):
                return "the gradient of an expert is not the sum over the tokens of all ranks"
    return ""
