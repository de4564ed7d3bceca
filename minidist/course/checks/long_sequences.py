"""The puzzles and the exercise of the lesson long_sequences."""

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from minidist.context_parallel.cuts import contiguous, zigzag
from minidist.course.checks.verdict import (
    NotYet,
    check,
    function,
    puzzle,
    ranks,
    require_right,
    same,
)
from minidist.instruments.measure import TrafficCounter
from minidist.machine.backend.process_group import ShmProcessGroup

B, H, D = 2, 3, 5
NAMES = "dq", "dk", "dv"


window = puzzle(__name__, "window")
ulysses_over_gather = puzzle(__name__, "ulysses_over_gather")


@check
def ring_backward(answer: object) -> None:
    """`ring_backward(q, k, v, out, lse, dout, positions)`: dq, dk, dv of this rank's tokens."""
    for size, more in product((2, 3, 4), (0, 1)):
        results = require_right(
            _trial, function(answer), 4 * size + more, world_size=size, of_rank=", "
        )
        sent, of_keys = (sum(numbers[i] for _, numbers in results) for i in (0, 1))
        hops, once = size - 1, 2 * B * H * D * 4 * size  # the keys and values of all, or gradients
        if sent > 1.01 * 2 * hops * once and not more:  # else one may have to pad
            keys = f"keys and values are everywhere after {hops}"
            why = keys if of_keys > 1.01 * hops * once else f"gradients can be home after {hops}"
            raise NotYet(
                f"on {ranks(size)}, all is right, but they send {sent:,} numbers together, and "
                f"{2 * hops * once:,} suffice: {why} hop{'s' * (hops > 1)}."
            )


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
    keys, of_keys, send = torch.stack([k, v]), [], ShmProcessGroup.send

    def noted(group: ShmProcessGroup, sent: Any, *args: Any) -> Any:
        of_keys.append(int(torch.isin(sent[0], keys).sum()))
        return send(group, sent, *args)

    with TrafficCounter() as traffic, mock.patch.object(ShmProcessGroup, "send", noted):
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
        if not same(found[i], right):
            near = [says for says, other in wrong.items() if same(found[i], other)]
            return f"{name} {near[0] if near else 'is not that of one process'}"
    return ""
