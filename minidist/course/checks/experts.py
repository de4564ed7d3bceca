"""The puzzles and the exercise of the lesson experts."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from minidist.course.checks.verdict import NotYet, check, function, hints, number, on_ranks, ranks
from minidist.instruments.link import Link

WIDTH, EXPERTS = 256, 12
SOME = 1.1  # times the bytes of the rows: with them go counts, weights and numbers of experts


@check
@hints(
    "Look at one node. Which of the ways to choose 8 experts of 256 leave it out?",
    "A node has 32 experts. It gets nothing if all 8 are among the other 224. Which part of all "
    "ways to choose 8 is that? The answer is a mean, so each node may be looked at alone.",
    "A node is left out with the probability comb(224, 8) / comb(256, 8). Take it from 1, and "
    "multiply by the number of nodes.",
)
def nodes_a_token(answer: object) -> str:
    """On how many of 8 nodes 8 of 256 experts are, on average, if chosen at random."""
    number(
        answer,
        8 * (1 - math.comb(224, 8) / math.comb(256, 8)),
        wrong={
            8: "8 experts are not always on 8 different nodes",
            4: "that is the limit that DeepSeek-V3 sets, and here there is none",
            8 * (1 - (7 / 8) ** 8): "that is for experts that may be chosen twice, and a token "
            "chooses 8 different ones",
            8 * math.comb(224, 8) / math.comb(256, 8): "so many nodes get nothing",
            1 - math.comb(224, 8) / math.comb(256, 8): "that is the part of the nodes",
            1: "each node has one of the token's experts on average, but some have two and others "
            "none",
        },
    )
    return "a node gets nothing only if all 8 experts are among the 224 of other nodes."


@check
@hints(
    "Write down the weight of the one expert that a token has chosen, when the weights are divided "
    "by their sum.",
    "It is p / p. By how much does that change if the router's scores change a little?",
    "p / p is 1, whatever the router says. A constant has which derivative?",
)
def router_gradient(answer: object) -> str:
    """The gradient of the router's weights if k = 1, and a token's weights are made to sum to 1."""
    rounded = isinstance(answer, float) and abs(answer) < 1e-12  # it was measured
    number(0 if rounded else answer, 0, wrong={1: "that is the weight, not how it changes"})
    return "the weight is p / p = 1, whatever the router says: it learns nothing."


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
@hints(
    "Look at `x[order // k]`: it has a row for each expert of a token. Which of these rows go to "
    "the same rank? What does that rank have to know besides the row?",
    "Send a row for each pair of a token and a rank, and with it a number for each expert of that "
    "rank: its weight, or 0. So weights travel through the autograd function, as part of the row.",
    "There, a row goes through each expert whose weight is not 0. Add the results, times their "
    "weights, in one row, send that back, and add it to its token.",
)
def dispatch_once(answer: object) -> str:
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
        results = on_ranks(*trial, world_size=size, nodes=size, link=link)
        for rank, (wrong, _) in enumerate(results):
            if wrong:
                raise NotYet(f"on {ranks(size)}, rank {rank}, {wrong}.")
        for layer, counted in zip(layers, results[0][1], strict=True):
            _few(layer, counted, size)
    return "each token travels once to each rank, and so does what comes back."


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
