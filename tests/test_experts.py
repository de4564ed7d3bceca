"""Experts on ranks compute what one process computes, where every expert computes every token.

That dense layer is the oracle for one layer: nothing in it is sorted or sent. For whole models the
oracle is `md.parity.check`. Three faults it cannot see, since both sides would have them: a wrong
auxiliary loss, weights that are always 1, a router in low precision. Those have numbers by hand.
"""

import copy
from functools import partial
from itertools import product
from math import comb
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_plan import raised
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist import experts as ex
from minidist.experts import balance, capacity, exchange, gradients, moe

E, C, H, K = 12, 8, 12, 3
EXACT = 1e-12


@pytest.fixture(scope="module")
def gloo():
    """Three ranks over gloo; all others are over shm."""
    with md.ranks(3, backend="gloo") as pool:
        yield pool


def worst(pairs):
    return max((md.parity.relative_difference(a, b) for a, b in pairs), default=0.0)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def mesh(experts):
    sizes = dist.get_world_size() // experts, experts
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "experts"))


# ---- one layer ------------------------------------------------------------------------------


# What a layer is given, and what makes its experts' products.
WAYS = {
    "every choice": {},
    "padded": {},
    "once": dict(once=True),
    "places for all": dict(capacity=E / K),
    "nodes": dict(sigmoid=True, nodes=4, of_nodes=2, aux=0.3),
    "nodes, once": dict(nodes=4, of_nodes=3, once=True, normalize=False),
    "k = 1": dict(k=1, shared=2, aux=0.3),
}
CASES = {  # tokens of rank r, and what is done to the router
    "random": (lambda r: 10, ""),
    "7, 0, 13 and 1 tokens": (lambda r: (7, 0, 13, 1)[r], ""),
    "all to the first 3": (lambda r: 10, "first"),
    "none to the last 3": (lambda r: 10, "not last"),
    "equal scores": (lambda r: 10, "equal"),
    "tokens on one rank": (lambda r: 10 * (r == 1), ""),
}


def layer_of(way, how=""):
    torch.manual_seed(0)
    made = ex.MoE(C, H, E, **dict(k=K) | WAYS[way]).double()
    made.router.bias += 0.05 * torch.randn(E, dtype=torch.float64)
    if how == "first":
        made.router.bias[:K] += 10
    if how == "not last":
        made.router.bias[-3:] -= 10
    if how == "equal":
        made.router.bias.zero_()
        nn.init.zeros_(made.router.linear.weight)
    if way == "padded":
        made.experts.compute = ex.padded
    return made


def best(values, names, count):
    """The names with the largest values; of equal ones the first."""
    return sorted(names, key=lambda name: (-values[name], name))[:count]


def takes(scores, k, nodes, of_nodes):
    """The experts that a token takes. scores: a list of E."""
    n = len(scores) // nodes
    of = [range(node * n, node * n + n) for node in range(nodes)]
    sums = [sum(scores[e] for e in best(scores, each, max(1, k // of_nodes))) for each in of]
    kept = best(sums, range(nodes), of_nodes)
    return best(scores, [e for node in sorted(kept) for e in of[node]], k)


def dense(layer, parts):
    """Outputs of the layer for each rank's rows, and the mean of their losses."""
    router, weight = layer.router, layer.router.linear.weight
    outputs, probabilities, rows = [], [], torch.zeros(E, dtype=torch.float64)
    for x in parts:
        logits = x @ weight.T
        scores = logits.sigmoid() if router.sigmoid else logits.softmax(-1)
        gates = torch.zeros_like(scores)
        for token, each in enumerate(scores + router.bias):
            chosen = takes(each.tolist(), router.k, router.nodes, router.of_nodes)
            total = scores[token, chosen].sum() if router.normalize else 1
            gates[token, chosen] = scores[token, chosen] / total
            rows[chosen] += 1
        hidden = F.gelu(torch.einsum("nc,ech->neh", x, layer.experts.up))
        y = torch.einsum("neh,ehc,ne->nc", hidden, layer.experts.down, gates)
        outputs.append(y if layer.shared is None else y + layer.shared(x))
        probabilities.append(scores / scores.sum(1, keepdim=True))
    losses = [y.sin().sum() for y in outputs]
    losses += [layer.aux * E * (rows / rows.sum() * p.mean(0)).sum() for p in probabilities if len(p)]
    return outputs, sum(losses) / len(parts)


def layer_on_ranks(case, way, of=0):
    """How far this rank's output and gradients are from the oracle's. of: how many ranks have
    other experts; 0: all."""
    tokens, how = CASES[case]
    rank, p = dist.get_rank(), dist.get_world_size()
    oracle, own = layer_of(way, how), layer_of(way, how)
    ex.parallelize(own, mesh(of) if of else None)
    xs = [torch.randn(tokens(r), C, dtype=torch.float64).requires_grad_() for r in range(p)]
    outputs, loss = dense(oracle, xs)
    loss.backward()
    x = xs[rank].detach().clone().requires_grad_()
    y = own(x)
    y.sin().sum().backward()
    apart = [(y, outputs[rank]), (x.grad, xs[rank].grad * p)]
    for (name, a), b in zip(own.named_parameters(), oracle.parameters(), strict=True):
        gradient = whole(a.grad)
        if not name.startswith("experts"):  # data parallelism averages these
            dist.all_reduce(gradient)
            gradient /= p
        apart.append((gradient, b.grad))
    if case == "all to the first 3" and p * (of or p) > 2 and way == "every choice":
        assert (sum(own.plan.receives) > 0) == (rank % (of or p) < K * (of or p) / E)
    apart.append((copy.deepcopy(own)(x), y))
    return worst(apart)


def off(cases):
    """The cases that are not exact, on this rank."""
    found = {case: layer_on_ranks(*case) for case in cases}
    return {case: far for case, far in found.items() if not far < EXACT}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_layer_is_that_of_one_process(pools, gloo, ranks):
    cases = list(product([case for case in CASES if ranks > 1 or "one rank" not in case], WAYS))
    if ranks == 4:  # replicas of halves, and of all experts
        uneven = "7, 0, 13 and 1 tokens"
        cases += [(uneven, way, of) for way in WAYS for of in (1, 2)]
    assert pools(ranks)(off, cases) == [{}] * ranks
    if ranks == 3:
        assert gloo(off, [case for case in cases if "tokens" in case[0]]) == [{}] * 3


def test_products_of_all_experts_at_once():
    torch.manual_seed(0)
    made = ex.Experts(4, C, 16)  # torch's product takes rows of 16 bytes
    counts, found = [31, 0, 9, 0], []
    for compute in (ex.loop, ex.padded, ex.grouped_mm):
        made.compute, x = compute, torch.randn(40, C, generator=torch.Generator().manual_seed(1))
        made.zero_grad()
        y = made(x.requires_grad_(), counts)
        y.sum().backward()
        found.append([y.detach(), x.grad, made.up.grad, made.down.grad])
    for each in found[1:]:
        assert worst(zip(each, found[0], strict=True)) < 1e-5


def with_places(factor):
    """How far from one process with a queue for each rank's tokens, and with one for all of them;
    and the dropped choices, and how many the oracle drops."""
    rank, p = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    own, oracle = (ex.MoE(C, H, E, K, capacity=c).double() for c in (factor, None))
    ex.parallelize(own)
    oracle.load_state_dict({name: whole(t) for name, t in own.state_dict().items()})
    xs = torch.randn(p, 24, C, dtype=torch.float64)
    y, found, dropped = own(xs[rank]), [], 0
    for queues in (xs, xs.flatten(0, 1).unsqueeze(0)):
        wanted = []
        for x in queues:
            room, taken = -(-int(1000 * factor * len(x) * K / E) // 1000), [0] * E
            weights, chosen, _ = oracle.router(x)
            weights = weights.clone()
            for choice, token in product(range(K), range(len(x))):  # first choices come first
                expert = int(chosen[token, choice])
                taken[expert] += 1
                if taken[expert] > room:
                    weights[token, choice] = 0
            with mock.patch.object(oracle.router, "forward", lambda _, r=(weights, chosen): r):
                pass
            hidden = F.gelu(torch.einsum("nc,ech->neh", x, oracle.experts.up))
            gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, chosen, weights)
            wanted.append(torch.einsum("neh,ehc,ne->nc", hidden, oracle.experts.down, gates))
            if len(queues) == p and len(wanted) == rank + 1:
                dropped = sum(max(0, n - room) for n in taken)
        found.append(worst([(y, torch.cat(wanted).view(p, 24, C)[rank])]))
    return *found, own.dropped, dropped
