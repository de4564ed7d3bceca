"""Ranks that share a sequence compute what one process computes: attention, losses, gradients.

Padding is a third of a row: a half would be as much on every rank of a zigzag, and hide a mean of
means. Gradients are compared, not losses alone: three of the bugs below leave the first loss equal.
"""

import contextlib
import copy
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_plan import raised
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist import context_parallel as cp
from minidist.context_parallel import context_parallel, cost, kernel
from minidist.context_parallel.cuts import Block, Cut

sdpa = F.scaled_dot_product_attention
WAYS = {"naive": lambda q, k, v, cut: cp.NaiveRing.apply(q, k, v, cut.positions), **cp.ATTENTION}
EXACT = 1e-12


@pytest.fixture(scope="module")
def gloo():
    """Three ranks over gloo; all others are over shm."""
    with md.ranks(3, backend="gloo") as pool:
        yield pool


def apart(found, wanted, of=None):
    """How far a part of a tensor is off, by the largest number of the whole."""
    return (found - wanted).abs().max() / (wanted if of is None else of).abs().max()


def worst(pairs):
    return max((float(apart(*pair)) for pair in pairs if pair[0].numel()), default=0.0)


def documents_of(length):
    """Three in a row."""
    return torch.arange(length).mul(3).div(length, rounding_mode="floor")


# ---- attention ------------------------------------------------------------------------------


def attention(way, kind, length, heads, kv_heads, several):
    """How far this rank's outputs and gradients are from one process's."""
    torch.manual_seed(0)
    shapes = [(2, each, length, 8) for each in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    rank, documents = dist.get_rank(), documents_of(length) if several else None
    cut = Cut.of(kind, length, dist.get_world_size(), documents)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if several:
        seen &= documents[:, None] == documents
    wanted = sdpa(*whole, seen, enable_gqa=True)
    wanted.backward(dout)
    own = [cut.take(x, rank, 2).requires_grad_() for x in (q, k, v)]
    found = WAYS[way](*own, cut)
    found.backward(cut.take(dout, rank, 2))
    pairs = [(found, wanted), *((a.grad, b.grad) for a, b in zip(own, whole, strict=True))]
    return worst((a, cut.take(b, rank, 2), b) for a, b in pairs)


def off(function, cases):
    """The cases that are not exact, on this rank."""
    found = {case: function(*case) for case in cases}
    return {case: far for case, far in found.items() if not far < EXACT}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_attention_is_that_of_one_process(pools, gloo, ranks):
    heads = 6 if ranks == 3 else 4
    cases = list(product(WAYS, cp.CUTS, [37, 5], [heads], [heads, heads // 2], [False, True]))
    # The naive ring has whole heads and one document.
    cases = [case for case in cases if case[0] != "naive" or (case[4] == heads and not case[5])]
    assert pools(ranks)(off, attention, cases) == [{}] * ranks
    if ranks == 3:
        assert gloo(off, attention, [case for case in cases if case[1] == "zigzag"]) == [{}] * 3


def without_flash(cases):
    with mock.patch.object(kernel, "_flash_on", "no device"):
        return off(attention, cases)


def test_attention_is_that_of_one_process_by_the_kernel_of_other_devices(pools):
    """Striped documents have queries that see no key of a block."""
    cases = list(product(["ring"], cp.CUTS, [37, 5], [4], [4, 2], [False, True]))
    assert pools(3)(without_flash, cases) == [{}] * 3


def sent(way, heads, kv_heads):
    """Bytes that this rank sends forward and backward, and what the formula says."""
    ranks, length = dist.get_world_size(), 24
    cut = Cut.of("zigzag", length, ranks)
    shapes = [(2, each, length // ranks, 8) for each in (heads, kv_heads, kv_heads)]
    own = [torch.randn(shape, requires_grad=True) for shape in shapes]
    counters = [md.measure.TrafficCounter() for _ in range(2)]
    with counters[0]:
        out = WAYS[way](*own, cut)
    with counters[1]:
        out.sum().backward()
    numbers = 2 * length * kv_heads * 8
    formula = cost.sent(way, ranks, numbers, heads, kv_heads)
    found = [
        # Collectives count with what stays here, too.
        counter.sent_bytes + sum(n for _, n in counter.calls.values()) * (ranks - 1) / ranks
        for counter in counters
    ]
    return found, [4 * each for each in formula]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_are_those_of_the_formula(pools, ranks):
    some = {2: (12, 4, 1), 3: (12, 6, 1), 4: (12, 4, 2)}  # Ulysses copies the fewest
    for way, kv_heads in product(WAYS, some[ranks]):
        if way != "naive" or kv_heads == 12:
            for found, formula in pools(ranks)(sent, way, 12, kv_heads):
                assert found == formula, (way, kv_heads)
