"""Experts on ranks compute what one process computes, where every expert computes every token.

That dense layer is the oracle for one layer: nothing in it is sorted or sent. For whole models the
oracle is `md.parity.check`. Three faults it cannot see, since both sides would have them: a wrong
auxiliary loss, weights that are always 1, a router in low precision. Those have numbers by hand.
"""

from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_plan import raised
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist import experts as ex
from minidist.experts import capacity

E, C, H, K = 12, 8, 12, 3
EXACT = 1e-12


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
    "nodes": dict(k=4, sigmoid=True, nodes=4, of_nodes=2, aux=0.3),
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
    """The experts that a token takes, the best one first. scores: a list of E."""
    n = len(scores) // nodes
    of = [range(node * n, node * n + n) for node in range(nodes)]
    sums = [sum(scores[e] for e in best(scores, each, max(1, k // of_nodes))) for each in of]
    return best(scores, [e for node in best(sums, range(nodes), of_nodes) for e in of[node]], k)


def dense(layer, x, room=None):
    """Output (N, C), scores (N, E), the rows for each expert (E,), and the dropped choices. room:
    the places of each expert in the queue of these tokens."""
    router = layer.router
    logits = x @ router.linear.weight.T
    scores = logits.sigmoid() if router.sigmoid else logits.softmax(-1)
    chosen = [
        takes(each.tolist(), router.k, router.nodes, router.of_nodes)
        for each in scores + router.bias
    ]
    rows, gates, dropped = torch.zeros(E, dtype=torch.float64), torch.zeros_like(scores), 0
    for choice, token in product(range(router.k), range(len(x))):  # first choices come first
        expert = chosen[token][choice]
        if room is None or rows[expert] < room:
            total = scores[token, chosen[token]].sum() if router.normalize else 1
            gates[token, expert] = scores[token, expert] / total
        else:
            dropped += 1
        rows[expert] += 1
    hidden = F.gelu(torch.einsum("nc,ech->neh", x, layer.experts.up))
    y = torch.einsum("neh,ehc,ne->nc", hidden, layer.experts.down, gates)
    return y if layer.shared is None else y + layer.shared(x), scores, rows, dropped


def one_process(layer, xs):
    """The output for each rank's rows, and the mean of the ranks' losses."""
    outputs, scores, rows, _ = zip(*(dense(layer, x) for x in xs), strict=True)
    losses = [y.sin().sum() for y in outputs]
    fractions = sum(rows) / sum(rows).sum()
    for each in scores:
        if len(each):
            means = (each / each.sum(1, keepdim=True)).mean(0)
            losses.append(layer.aux * E * (fractions * means).sum())
    return outputs, sum(losses) / len(xs)


def on_ranks(case, way, of=0):
    """How far this rank's output and gradients are from the oracle's. of: how many ranks have
    other experts; 0: all."""
    tokens, how = CASES[case]
    rank, p = dist.get_rank(), dist.get_world_size()
    oracle, own = layer_of(way, how), layer_of(way, how)
    if rank:  # all take rank 0's
        for each in [own.router.bias, *own.parameters()]:
            each.detach().normal_()
    ex.parallelize(own, mesh(of) if of else None)
    torch.manual_seed(1)
    xs = [torch.randn(tokens(r), C, dtype=torch.float64).requires_grad_() for r in range(p)]
    outputs, loss = one_process(oracle, xs)
    loss.backward()
    x = xs[rank].detach().clone().requires_grad_()
    y = own(x)
    y.sin().sum().backward()
    pairs = [(y, outputs[rank]), (x.grad, xs[rank].grad * p)]
    for (name, a), b in zip(own.named_parameters(), oracle.parameters(), strict=True):
        gradient = whole(a.grad)
        if not name.startswith("experts"):  # data parallelism averages these
            dist.all_reduce(gradient)
            gradient /= p
        pairs.append((gradient, b.grad))
    return worst(pairs)


def off(cases):
    """The cases that are not exact, on this rank."""
    found = {case: on_ranks(*case) for case in cases}
    return {case: far for case, far in found.items() if not far < EXACT}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_layer_is_that_of_one_process(pools, gloo, ranks):
    cases = list(product([case for case in CASES if ranks > 1 or "one rank" not in case], WAYS))
    if ranks == 4:  # replicas of halves, and of all experts
        cases += [("7, 0, 13 and 1 tokens", way, of) for way in WAYS for of in (1, 2)]
    assert pools(ranks)(off, cases) == [{}] * ranks
    if ranks == 3:
        assert gloo(off, [case for case in cases if "tokens" in case[0]]) == [{}] * 3


def test_some_ranks_have_no_rows(pools):
    """As the test above needs it."""

    def run(case):
        own = ex.parallelize(layer_of("every choice", CASES[case][1]))
        x = torch.randn(4, 10, C, dtype=torch.float64)[dist.get_rank()]
        with torch.no_grad():
            own(x)
        return own.counts.tolist(), own.plan.sends, own.plan.receives

    first = pools(4)(run, "all to the first 3")
    assert first == [([10] * 3 + [0] * 9, [30, 0, 0, 0], [30 * (r == 0)] * 4) for r in range(4)]
    assert all(counts[-3:] == [0] * 3 for counts, *_ in pools(4)(run, "none to the last 3"))


@pytest.mark.parametrize("hidden", [16, 9])  # torch's product takes whole 16 bytes
def test_products_of_all_experts_at_once(hidden):
    torch.manual_seed(0)
    made, found = ex.Experts(4, C, hidden), []
    for compute in (ex.loop, ex.padded, ex.grouped_mm if hidden == 16 else made.compute):
        made.compute, x = compute, torch.randn(40, C, generator=torch.Generator().manual_seed(1))
        made.zero_grad()
        y = made(x.requires_grad_(), [31, 0, 9, 0])
        y.sum().backward()
        found.append([y.detach(), x.grad, made.up.grad, made.down.grad])
    for each in found[1:]:
        assert worst(zip(each, found[0], strict=True)) < 1e-5


def in_lower_precision(case, way, by_autocast):
    """How far this rank's output and gradients are from those in float64; its experts in float32
    are computed by torch's product of all at once."""
    rank, (tokens, how) = dist.get_rank(), CASES[case]
    exact, rough = (ex.parallelize(layer_of(way, how)) for _ in range(2))
    x, found = torch.randn(4, 13, C, dtype=torch.float64)[rank, : tokens(rank)], []
    for each in (exact, rough.float()):
        own = x.to(each.router.bias.dtype, copy=True).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=by_autocast and each is rough):
            y = each(own)
        y.float().sin().sum().backward()
        found.append([y, own.grad, *(whole(p.grad) for p in each.parameters())])
    return worst(zip(*[[t.detach().double() for t in each] for each in found], strict=True))


def test_lower_precisions_are_near(pools):
    """And each rank has a gradient of each parameter."""
    for case, way in product(("7, 0, 13 and 1 tokens", "all to the first 3"), WAYS):
        assert max(pools(4)(in_lower_precision, case, way, False)) < 1e-5, (case, way)
        assert max(pools(4)(in_lower_precision, case, way, True)) < 0.1, (case, way)


def with_places(factor, room):
    """How far from one process with a queue for each rank's tokens, and with one for all; and the
    dropped choices, and the oracle's."""
    rank, p = dist.get_rank(), dist.get_world_size()
    oracle, own = layer_of("every choice"), ex.parallelize(layer_of("every choice"))
    own.capacity = factor
    xs = torch.randn(p, 24, C, dtype=torch.float64)
    y = own(xs[rank])
    own_queue, *_, dropped = dense(oracle, xs[rank], room)
    one_queue = dense(oracle, xs.flatten(0, 1), p * room)[0].view_as(xs)[rank]
    far = (md.parity.relative_difference(y, each) for each in (own_queue, one_queue))
    return *far, own.dropped, dropped


def test_places_are_those_of_a_queue_for_each_ranks_tokens(pools):
    for factor, room in ((0.5, 3), (1.1, 7), (4.0, 24)):  # of 24 tokens each expert gets 6 if even
        for far, one_queue, dropped, wanted in pools(4)(with_places, factor, room):
            assert far < EXACT and dropped == wanted
            assert (one_queue > 0.1) == (dropped > 0) == (factor < 4)


# ---- messages -------------------------------------------------------------------------------


def bytes_sent(way, skew):
    """What has left this rank, which is a node of its own, and what the formula says."""
    rank, p = dist.get_rank(), dist.get_world_size()
    own = layer_of(way)
    own.aux = 0.0  # whose sum is another message
    own.router.bias += torch.linspace(skew, 0, E)
    ex.parallelize(own)
    x = torch.randn(20 + 5 * rank, C, dtype=torch.float64).requires_grad_()
    dist.barrier()
    before = md.Link.sent_by_node(rank)
    own(x).sum().backward()
    dist.barrier()
    found = md.Link.sent_by_node(rank) - before
    counts = 8 * (p - 1) * (1 if own.once else E // p)
    sends, receives = (sum(each) - each[rank] for each in own.plan)
    assert own.plan.leaving(rank) == sends + receives
    width = 2 * C + (E // p if own.once else 0)  # a row, and its result; their gradients
    return found, 8 * width * (sends + receives) + counts, sends, len(x)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_are_those_of_the_formula(ranks):
    with md.ranks(ranks, nodes=ranks, link=md.Link(gbps=100, latency_us=1)) as pool:
        for way, skew in product(("every choice", "once"), (0.0, 0.3)):
            for found, formula, sends, tokens in pool(bytes_sent, way, skew):
                assert found == formula, (way, skew)
                if way == "once":  # at most a row for each other rank
                    assert sends <= (ranks - 1) * tokens


# ---- balance, by hand -----------------------------------------------------------------------


def test_imbalance_and_the_auxiliary_loss_by_hand():
    counts = torch.tensor([6, 0, 2, 0])
    assert ex.imbalance(counts) == 3.0 and ex.imbalance(counts, ranks=2) == 1.5
    even, first = torch.full((5, 4), 0.25), torch.tensor([[0.5, 0.5, 0.0, 0.0]] * 5)
    assert ex.switch_loss(even, counts) == 1  # either is even
    assert ex.switch_loss(first, torch.full((4,), 9)) == 1
    assert ex.switch_loss(first, torch.tensor([5, 5, 0, 0])) == 2  # E / k
    scores = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]], requires_grad=True)
    loss = ex.switch_loss(scores, counts)  # f is (3/4, 0, 1/4, 0), P is (0.4, 0.15, 0.2, 0.25)
    assert loss.item() == pytest.approx(4 * (0.75 * 0.4 + 0.25 * 0.2))
    # Sigmoids are divided by their sum.
    assert ex.switch_loss(2 * scores, counts).item() == pytest.approx(loss.item())


def test_a_router_learns_of_the_auxiliary_loss_alone():
    """And neither the output nor what backward begins with is changed."""
    layer = layer_of("every choice")
    x = torch.randn(9, C, dtype=torch.float64, requires_grad=True)
    plain = layer(x)
    layer.aux = 0.5
    y = layer(x)
    assert torch.equal(y, plain)
    (0 * y).sum().backward()
    found = [layer.router.linear.weight.grad, x.grad]
    loss = 0.5 * ex.switch_loss(layer.router(x).scores, layer.counts)
    wanted = torch.autograd.grad(loss, [layer.router.linear.weight, x])
    assert worst(zip(found, wanted, strict=True)) < EXACT and wanted[0].abs().max() > 1e-3


def biased(of):
    """Rows for each expert, and the bias after it, in two steps of two micro-batches that are
    computed again in backward."""
    torch.manual_seed(0)
    layer, steps = ex.parallelize(ex.MoE(C, H, E, 2), mesh(of)), []
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        rows = torch.zeros(E)
        for _ in range(2):
            x = torch.randn(5, C, requires_grad=True)
            checkpoint(layer, x, use_reentrant=False).sum().backward()
            rows += layer.counts
        layer.eval()(torch.randn(50, C))  # does not count
        layer.train()
        assert torch.equal(layer.router.seen, rows)
        ex.update_bias(layer, 0.01)
        steps.append((rows, layer.router.bias.clone()))
    return steps


@pytest.mark.parametrize("of", [2, 4])
def test_the_bias_follows_the_rows_of_all_ranks_since_the_last_call(pools, of):
    before = torch.zeros(E)
    for each in zip(*pools(4)(biased, of), strict=True):
        rows = sum(rows for rows, _ in each)
        before += 0.01 * torch.sign(rows.mean() - rows)
        assert rows.sum() == 4 * 2 * 5 * 2 and all(torch.equal(bias, before) for _, bias in each)


def test_the_bias_chooses_and_does_not_weigh():
    router = ex.Router(C, E, 2, sigmoid=True)
    router.bias[-2:] += 10
    weights, chosen, scores = router(torch.randn(7, C))
    assert set(chosen.flatten().tolist()) == {E - 2, E - 1}
    own = scores[:, -2:] / scores[:, -2:].sum(1, keepdim=True)
    assert torch.allclose(weights.sort(1).values, own.sort(1).values)


@pytest.mark.parametrize("k", [1, 2])
def test_the_router_gets_a_gradient(k):
    """With k = 1 only because its weight is not divided by itself."""
    layer = ex.MoE(C, H, E, k).double()
    layer(torch.randn(20, C, dtype=torch.float64)).square().sum().backward()
    assert layer.router.linear.weight.grad.abs().max() > 1e-3


def test_a_router_computes_in_float32():
    x, router = torch.randn(512, 64), ex.Router(64, 64, 6)
    exact = router(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(router(x).scores, exact.scores)
    rough = router.bfloat16()(x.bfloat16())
    assert rough.scores.dtype == torch.float32
    logits = x.bfloat16().float() @ router.linear.weight.float().T
    assert torch.equal(rough.chosen.sort(1).values, logits.topk(6).indices.sort(1).values)


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_in_bfloat16_stays_so(way):
    own, x = layer_of(way).bfloat16(), torch.randn(10, C).bfloat16()
    y = own(x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and all(p.grad.isfinite().all() for p in own.parameters())


# ---- whole models ---------------------------------------------------------------------------


def transformer(k=2, **options):
    model = md.zoo.Transformer(length=8, width=16, layers=2)
    nn.init.normal_(model.positions.weight, std=0.02)  # or a router would see nothing else
    for block in model.blocks:
        block.mlp = ex.MoE(16, 24, E, k, **options)
    return model


AUX = dict(aux=0.1, shared=1)
SIGMOID = dict(k=3, sigmoid=True, nodes=4, of_nodes=2, aux=0.1)


def expert_parallel(model):
    return md.DistributedDataParallel(ex.parallelize(model))


def clipped(model, optimizer, inputs, targets, loss_fn):
    optimizer.zero_grad()
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    ex.clip_grad_norm_(model, 0.3)
    optimizer.step()
    return loss


def parity(pool, strategy, options=AUX, **more):
    made = partial(transformer, **options)
    data = md.zoo.text(8)
    more = dict(data=data, steps=3, batch_size=12, ranks=pool) | more
    return md.parity.check(strategy, model=made, **more)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_model_trains_as_in_one_process(pools, gloo, ranks):
    parity(pools(ranks), expert_parallel, clip=0.3, step=clipped)
    if ranks == 3:
        parity(gloo, expert_parallel, SIGMOID | dict(once=True))


# ---- bad input ------------------------------------------------------------------------------


def layer(**options):
    return ex.MoE(**dict(width=C, hidden=H, experts=E, k=2) | options)


def other_on_rank_3(**options):
    return ex.parallelize(layer(**options if dist.get_rank() == 3 else {}))


REFUSED = {
    "a token cannot take 5 of 4 experts": lambda: layer(experts=4, k=5),
    "a token cannot take 4 of 12 experts, on 1 of 4 nodes": lambda: layer(k=4, nodes=4, of_nodes=1),
    "k=1, normalize=True: all weights are 1": lambda: layer(k=1, normalize=True),
    "with a capacity, a token travels to each expert": lambda: layer(capacity=1.0, once=True),
    "10 experts cannot be shared by 4 ranks": lambda: ex.parallelize(layer(experts=10)),
    "3 experts cannot be shared by 4 ranks": lambda: ex.parallelize(layer(experts=3)),
    "a mesh with an axis experts, not ('data',)": lambda: ex.parallelize(
        layer(), init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    ),
    "it takes a model with a MoE": lambda: ex.parallelize(nn.Linear(2, 2)),
    "rank 3 says ['24 experts": lambda: other_on_rank_3(experts=24),
    "k=3": lambda: other_on_rank_3(k=3),
    "rank 3: parameter 1.weight, shape (4, 8)": lambda: ex.parallelize(
        nn.Sequential(layer(), nn.Linear(C, 3 + dist.get_rank() // 3))
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_would_be_wrong_is_refused_on_every_rank(pools, said):
    told = pools(4)(raised, REFUSED[said])
    assert all(each and said in each for each in told), told


def own_room():
    """Places for a rank's own number of tokens."""
    own = ex.parallelize(layer(capacity=1.0))
    with mock.patch.object(capacity.dist, "all_reduce", lambda *_: None):
        own(torch.randn((7, 0, 13, 1)[dist.get_rank()], C))


def leaves_the_graph():
    own = ex.parallelize(layer())
    with torch.set_grad_enabled(dist.get_rank() != 1):
        y = own(torch.randn(5, C)).sum()
    if dist.get_rank() != 1:
        y.backward()
    dist.barrier()


@pytest.mark.parametrize("function", [own_room, leaves_the_graph])
def test_ranks_that_do_not_match_are_named_and_do_not_hang(function):
    with md.ranks(4, timeout=20) as pool, pytest.raises(md.RankError, match="rank 1"):
        pool(function)
