"""The puzzles and the exercise of the lesson long_sequences."""

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from minidist.context_parallel.cuts import contiguous, zigzag
from minidist.course.checks.verdict import NotYet, check, function, hints, number, on_ranks, ranks
from minidist.instruments.measure import TrafficCounter
from minidist.machine.backend.process_group import ShmProcessGroup as Group

B, H, D = 2, 3, 5
NAMES = "dq", "dk", "dv"


@check
@hints(
    "Look at the triangle, and count in blocks: one rank's queries with another rank's "
    "keys. A block on the diagonal is half a block.",
    "All ranks together have the triangle to compute. Evenly shared, that is so many blocks for "
    "each. Then count those of the last rank, which is never idle.",
    "The triangle has N · N/2 blocks. The last rank computes N − 1 whole ones and a half. Divide "
    "the N-th part of the first by the second.",
)
def contiguous_efficiency(answer: object) -> str:
    """Computing time if evenly shared, over that of the contiguous cut, on 8 ranks."""
    number(
        answer,
        8 / 15,
        wrong={
            15 / 8: "that is how many times longer it takes",
            0.539: "that is measured, and the formula leaves out all but the triangle",
            1 / 2: "that is the limit for many ranks, and here are 8",
            9 / 16: "the block of a rank's own keys is masked above its diagonal, so it is half a "
            "block",
            4 / 7: "that is for 4 ranks",
            15 / 64: "that is the last rank's share of all pairs",
            7 / 15: "that is what is lost",
        },
    )
    return "8 · 8/2 blocks on 8 ranks are 4 for each, and the last has 7.5."


@check
@hints(
    "Look at the formulas of what each way sends. Of 128 heads and 8 of keys, how many has a rank "
    "of a tensor group of 8?",
    "Gathering brings the keys and values of all tokens to each rank, for every head of keys that "
    "it has. Ulysses gives each of 16 ranks one of 16 heads. Whose keys does that head need?",
    "16 ranks need a copy each of the one head of keys. So Ulysses moves the 16 heads of queries "
    "and of outputs, and 16 copies of keys and of values, each divided by 16 ranks.",
)
def ulysses_over_gather(answer: object) -> str:
    """What a rank sends by Ulysses over what it sends by gathering: Llama 405B, tp 8, cp 16."""
    number(
        answer,
        2,
        wrong={
            1 / 2: "that is the other way round",
            9 / 8: "tensor parallelism leaves each rank an eighth of the heads",
            17 / 16: "the one head of keys is needed on all 16 ranks: a copy for each",
            1: "queries and outputs travel, and so do keys and values",
            3 / 2: "queries, keys, values and outputs travel, all four",
            32: "each rank has a 16th of the tokens, and sends only what these have",
            16: "each rank has a 16th of the tokens, and sends only what these have",
        },
    )
    return "16 + 16 heads for each 16th of the tokens, against one head of all: twice as much."


@check
@hints(
    "Look at the loop of the naive backward. When it has ended, whose gradients does a rank hold, "
    "and what is the hop after it for?",
    "The gradients of rank s's keys have to visit all other ranks and to end at s. Let them begin "
    "at its right neighbour: then they come home with the hop N − 1. What is missing?",
    "Keep the own keys' gradients in a pair of tensors of their own. In each later step compute "
    "the part of the block that came, add it to what came from the left, and pass on the sum. Add "
    "what comes last to your own.",
)
def ring_backward(answer: object) -> str:
    """`ring_backward(q, k, v, out, lse, dout, positions)`: dq, dk, dv of this rank's tokens."""
    for size, more in product((2, 3, 4), (0, 1)):
        results = on_ranks(_trial, function(answer), 4 * size + more, world_size=size)
        for rank, (wrong, _) in enumerate(results):
            if wrong:
                raise NotYet(f"on {ranks(size)}, rank {rank}, {wrong}.")
        sent, of_keys = (sum(numbers[i] for _, numbers in results) for i in (0, 1))
        hops, once = size - 1, 2 * B * H * D * 4 * size  # the keys and values of all, or gradients
        if sent > 1.01 * 2 * hops * once and not more:  # else one may have to pad
            keys = f"keys and values are everywhere after {hops}"
            why = keys if of_keys > 1.01 * hops * once else f"gradients can be home after {hops}"
            raise NotYet(
                f"on {ranks(size)}, all is right, but they send {sent:,} numbers together, and "
                f"{2 * hops * once:,} suffice: {why} hop{'s' * (hops > 1)}."
            )
    return "the gradients of one process, and they are home after N - 1 hops."


def _trial(answer: Callable[..., Any], length: int) -> tuple[str, tuple[int, int]]:
    """What is wrong on this rank; numbers sent in a case, and those of them that are of keys."""
    wrong = []
    for cut in contiguous, zigzag:  # both: if one is wrong on this rank, others go on
        differs, numbers = _case(answer, cut(length, dist.get_world_size()))
        wrong += [f"{cut.__name__} cut of {length} tokens: {differs}"] if differs else []
    return "".join(wrong[:1]), numbers


def _case(answer: Callable[..., Any], cut: list[torch.Tensor]) -> tuple[str, tuple[int, int]]:
    rank, length = dist.get_rank(), sum(map(len, cut))
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, B, H, length, D, dtype=torch.float64)
    scores = (q @ k.mT * D**-0.5).masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf)
    tensors = q, k, v, scores.softmax(-1) @ v, scores.logsumexp(-1), dout
    keys, of_keys, send = torch.stack([k, v]), [], Group.send

    def noted(group: Group, sent: Any, *args: Any) -> Any:
        of_keys.append(int(torch.isin(sent[0], keys).sum()))
        return send(group, sent, *args)

    with TrafficCounter() as traffic, mock.patch.object(Group, "send", noted):
        found = answer(*(x.index_select(2, cut[rank]) for x in tensors), cut)
    whole = [((name == "all_reduce") + 1) * nbytes for name, (_, nbytes) in traffic.calls.items()]
    sent = traffic.sent_bytes + (1 - 1 / len(cut)) * sum(whole)
    return _differs(found, (q, k, v), dout, cut), (round(sent / q.itemsize), sum(of_keys))


def _differs(
    found: Any, tensors: tuple[torch.Tensor, ...], dout: torch.Tensor, cut: list[torch.Tensor]
) -> str:
    """What is wrong with dq, dk and dv of this rank, if anything."""
    if not isinstance(found, tuple | list) or [torch.is_tensor(x) for x in found] != [True] * 3:
        return "it does not return three tensors, dq, dk and dv"
    leaves, here = [x.clone().requires_grad_() for x in tensors], cut[dist.get_rank()]
    q, k, v = leaves
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    by_own = torch.zeros_like(dout).index_copy(2, here, dout.index_select(2, here))
    wholes, parts = (torch.autograd.grad(out, leaves, g, retain_graph=True) for g in (dout, by_own))
    for i, name in enumerate(NAMES):
        right, own, swapped = (x.index_select(2, here) for x in (wholes[i], parts[i], wholes[-i]))
        if found[i].shape != right.shape:
            return f"{name} has shape {tuple(found[i].shape)}, not {tuple(right.shape)}"
        wrong = {
            "lacks what this rank's own queries add": right - own,
            "has twice what this rank's own queries add": right + own,
            "lacks what the other ranks' queries add": own,
            "lacks the factor D ** -0.5 of the scores": right * D**0.5,
            f"is {NAMES[-i]}": swapped,
        }
        for rank, tokens in enumerate(cut):
            wrong[f"belongs to the tokens of rank {rank}"] = wholes[i].index_select(2, tokens)
        if not _close(found[i], right):
            near = [says for says, other in wrong.items() if _close(found[i], other)]
            return f"{name} {near[0] if near else 'is not that of one process'}"
    return ""


def _close(found: torch.Tensor, right: torch.Tensor) -> bool:
    same = found.shape == right.shape and found.dtype == right.dtype
    return same and bool((found - right).abs().max() <= 1e-12 * right.abs().max())
