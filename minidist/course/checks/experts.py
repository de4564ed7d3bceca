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
    number,
    puzzle,
    ranks,
    require_right,
)
from minidist.instruments.link import Link

WIDTH, EXPERTS = 256, 12
SOME = 1.1  # times the bytes of the rows: with them go counts, weights and numbers of experts


nodes_a_token = puzzle(__name__, "nodes_a_token")


@check
def router_gradient(answer: object) -> None:
    """The gradient of the router's weights if k = 1, and a token's weights are made to sum to 1."""
    rounded = isinstance(answer, float) and abs(answer) < 1e-12  # it was measured
    number(0 if rounded else answer, 0, wrong={1: "that is the weight, not how it changes"})


# ---- the exercise -----------------------------------------------------------------------------


class Layer(NamedTuple):
    """Where tokens come from and go to: `tokens[r]` of rank r, each with k of these experts."""

    says: str
    tokens: tuple[int, ...]
    first: int
    k: int


class Counted(NamedTuple):
    """All ranks together: bytes that left a rank in forward, rows that went through experts."""

    nbytes: float
    computed: int


@check
def dispatch_once(answer: object) -> None:
    """`dispatch_once(x, weights, chosen, experts)`: y of this rank's tokens. x (N, C), weights and
    chosen (N, k); experts: this rank's own. Their gradients are the sum over all ranks' tokens."""
    for size in (2, 3, 4):
        n = EXPERTS // size
        layers = [
            Layer("", (9, 0, 5, 7)[:size], 0, 4),
            Layer("if all tokens go to the last rank, ", (4, 2, 5, 3)[:size], EXPERTS - n, 3),
        ]
        link = Link(100, 1)  # it counts what leaves a node, and here each rank is one
        trial = _trial, function(answer), layers
        results = require_right(*trial, world_size=size, of_rank=", ", nodes=size, link=link)
        for layer, counted in zip(layers, results[0][1], strict=True):
            _few(layer, counted, size)


def _few(layer: Layer, counted: Counted, size: int) -> None:
    """Refuse what sends or computes more rows than are needed."""
    naive = once = 0
    for rank in range(size):
        for token in _inputs(layer, rank)[2] // (EXPERTS // size):
            naive += int((token != rank).sum())
            once += len({*token.tolist()} - {rank})
    chosen = sum(layer.tokens) * layer.k
    if counted.computed > chosen:
        raise NotYet(
            f"on {ranks(size)}, {layer.says}all is right, but the experts compute "
            f"{counted.computed} rows, and {chosen} have chosen them."
        )
    sent = counted.nbytes / 8 / WIDTH
    if sent > 2 * once * SOME:
        ways = {2 * naive: "both ways", once + naive: "one way"}
        near = [way for rows, way in ways.items() if rows <= sent <= rows * SOME]
        why = f": {near[0]} there is a row for each expert of a token" if near else ""
        raise NotYet(
            f"on {ranks(size)}, {layer.says}all is right, but {sent:.0f} rows of "
            f"{WIDTH} numbers leave the ranks, and {2 * once} suffice, there and back{why}."
        )


def _trial(answer: Callable[..., Any], layers: list[Layer]) -> tuple[str, list[Counted]]:
    """What is wrong on this rank, and what was counted in each layer."""
    found = [_on_a_layer(answer, layer) for layer in layers]
    wrong = [
        f"{layer.says}{wrong}" for layer, (wrong, _) in zip(layers, found, strict=True) if wrong
    ]
    return "".join(wrong[:1]), [counted for _, counted in found]


def _on_a_layer(answer: Callable[..., Any], layer: Layer) -> tuple[str, Counted]:
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
    return wrong, Counted(counts[0].item(), round(counts[1].item()))


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

    if not _close(y, by(gates)):
        own = torch.zeros(size, 1).double().index_fill(0, torch.tensor([rank]), 1)
        least = gates.masked_fill(gates == 0, 1).amin(2, True)  # of a token's experts on a rank
        several = "has one expert of a rank where a token has chosen several"
        wrong_gates = [
            ("lacks the weights of the experts", (gates > 0).double()),
            ("has only what the experts of this rank add", gates * own),
            ("lacks what the experts of this rank add", gates * (1 - own)),
            (several, gates * (gates == gates.amax(2, True))),
            (several, gates * (gates == least)),
            ("has each expert times all weights of its rank", (gates > 0) * gates.sum(2, True)),
        ]
        near = [says for says, other in wrong_gates if _close(y, by(other))]
        return f"y {near[0] if near else 'is not that of one process'}"
    for name, found, leaf in zip(("x", "weights"), grads, everybody[rank], strict=False):
        if len(leaf) and (found is None or not found.any()):
            return f"no gradient reaches {name}: it travels without a function of autograd"
        if len(leaf) and not _close(found, leaf.grad):
            return f"the gradient of {name} is not that of one process"
    for have, expert in zip(mine, experts[rank * n :], strict=False):
        for a, b in zip(have.parameters(), expert.parameters(), strict=True):
            if not _close(torch.zeros_like(a) if a.grad is None else a.grad, b.grad):
                return "the gradient of an expert is not the sum over the tokens of all ranks"
    return ""


def _close(found: torch.Tensor, right: torch.Tensor | None) -> bool:
    assert right is not None  # one process has computed it
    return not len(found) or bool((found - right).abs().max() <= 1e-12 * right.abs().max())
