"""Ranks that share a sequence compute what one process computes: attention, losses, gradients.

A third of a row is padding: a half would be as much on every rank of a zigzag, and hide a mean of
means. Gradients are compared, not losses alone: faults of gradients leave the first loss equal.
"""

import copy
from contextlib import nullcontext
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_plan import raised
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist import context_parallel as cp
from minidist.context_parallel import kernel
from minidist.context_parallel.cuts import Cut

sdpa = F.scaled_dot_product_attention
WAYS = {"naive": lambda q, k, v, cut: cp.NaiveRing.apply(q, k, v, cut.positions), **cp.ATTENTION}
EXACT = 1e-12


def worst(pairs):
    """How far tensors, or parts of them, are off, by the largest number of the whole."""
    found = [
        (a - b).abs().max() / (of[0] if of else b).abs().max() for a, b, *of in pairs if a.numel()
    ]
    return float(max(found, default=0.0))


def gradients(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return [(a.grad, b.grad) for a, b in pairs]


def off(function, cases):
    """The cases that are not exact, on this rank."""
    found = {case: function(*case) for case in cases}
    return {case: far for case, far in found.items() if not far < EXACT}


def documents_of(length):
    """Three in a row."""
    return torch.arange(length).mul(3).div(length, rounding_mode="floor")


# ---- attention ------------------------------------------------------------------------------


def attention(way, kind, length, heads, kv_heads, several):
    """How far this rank's outputs and gradients are from one process's."""
    torch.manual_seed(0)
    shapes = [(2, each, length, 8) for each in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    rank, documents = dist.get_rank(), documents_of(length) if several else torch.zeros(length)
    cut = Cut.of(kind, length, dist.get_world_size(), documents if several else None)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = sdpa(*whole, (documents[:, None] == documents).tril(), enable_gqa=True)
    wanted.backward(dout)
    # As a convolution lays them out: a token's numbers are not in a row.
    *own, dout = (cut.take(x, rank, 2).mT.contiguous().mT for x in (q, k, v, dout))
    own = [x.requires_grad_() for x in own]
    found = WAYS[way](*own, cut)
    found.backward(dout)
    pairs = [(found, wanted), *((a.grad, b.grad) for a, b in zip(own, whole, strict=True))]
    return worst((a, cut.take(b, rank, 2), b) for a, b in pairs)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_attention_is_that_of_one_process(pools, gloo, ranks):
    heads = 6 if ranks == 3 else 4
    cases = list(product(WAYS, cp.CUTS, [37, 5], [heads], [heads, heads // 2], [False, True]))
    # The naive ring has whole heads and one document.
    cases = [case for case in cases if case[0] != "naive" or (case[4] == heads and not case[5])]
    assert pools(ranks)(off, attention, cases) == [{}] * ranks
    if ranks == 3:
        assert gloo(off, attention, [case for case in cases if case[1] == "zigzag"]) == [{}] * 3


def test_attention_is_that_of_one_process_by_the_kernel_of_other_devices(pools):
    def run(cases):
        with mock.patch.object(kernel, "_flash_on", "no device"):
            return off(attention, cases)

    # Striped documents have queries that see no key of a block.
    cases = list(product(["ring"], cp.CUTS, [37, 5], [4], [4, 2], [False, True]))
    assert pools(3)(run, cases) == [{}] * 3


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
    formula = cp.cost.sent(way, ranks, 2 * length * kv_heads * 8, heads, kv_heads)
    # Collectives are counted with what stays here, too.
    collective = [sum(n for _, n in each.calls.values()) * (ranks - 1) / ranks for each in counters]
    found = [each.sent_bytes + more for each, more in zip(counters, collective, strict=True)]
    return found, [4 * each for each in formula]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_are_those_of_the_formula(pools, ranks):
    some = {2: (12, 4, 1), 3: (12, 6, 1), 4: (12, 4, 2)}  # Ulysses copies the fewest
    for way, kv_heads in product(WAYS, some[ranks]):
        if way != "naive" or kv_heads == 12:
            for found, formula in pools(ranks)(sent, way, 12, kv_heads):
                assert found == formula, (way, kv_heads)


# ---- whole models ---------------------------------------------------------------------------


def batch(step=0, length=29):
    inputs, targets = (x[step * 2 :][:2] for x in md.zoo.text(length))
    targets = targets.clone()
    targets[0, length - length // 3 :] = -100
    return inputs, targets


def decoder(kv_heads=2):
    return md.zoo.Decoder(width=48, heads=12, kv_heads=kv_heads).double()


def transformer():
    return md.zoo.Transformer(length=29, width=24, heads=12).double()


def alone(model, inputs, targets, documents=None):
    """The loss in one process."""
    if documents is None:
        logits = model(inputs)
    else:
        lengths = documents.unique_consecutive(return_counts=True)[1]
        positions = torch.cat([torch.arange(int(each)) for each in lengths])
        seen = (documents[:, None] == documents).tril()
        with cp.attention_by(lambda q, k, v: sdpa(q, k, v, seen, enable_gqa=True)):
            logits = model(inputs, positions)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def usual(model, *data):
    loss = model(*data)
    loss.backward()
    return loss.detach()


def loss_and_gradient(way, several, make):
    """How far the loss is off, and the worst of the gradients."""
    one, own, data = make(), make(), batch()
    data = *data, documents_of(data[0].shape[1]) if several else None
    wanted = alone(one, *data)
    wanted.backward()
    loss = usual(md.ContextParallel(own, way), *data)
    return worst([(loss, wanted.detach())]), worst(gradients(own, one))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_losses_and_gradients_are_those_of_one_process(pools, gloo, ranks):
    def far(*case):
        return max(loss_and_gradient(*case))

    models = [partial(decoder, {2: 4, 3: 6, 4: 2}[ranks]), transformer]
    cases = list(product(cp.ATTENTION, [False, True], models))
    assert pools(ranks)(off, far, cases) == [{}] * ranks
    if ranks == 3:
        assert gloo(off, far, [("ring", True, models[0])]) == [{}] * 3


OPTIONS = dict(lr=0.1, momentum=0.9)


def sgd(model):
    return torch.optim.SGD(model.parameters(), **OPTIONS)


def zero(model):
    return md.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **OPTIONS)


def layerwise(shard):
    def wrap(model, *_):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in [*model.layers, model]:
            shard(part, mesh=mesh)
        return model

    return wrap


def hybrid(model, mesh, _):
    """Sharded along data, replicas along context."""
    mesh = DeviceMesh("cpu", mesh.mesh.T.contiguous(), mesh_dim_names=("context", "data"))
    policy = md.fully_sharded.by_class(md.zoo.DecoderLayer)
    return md.FullyShardedDataParallel(model, auto_wrap_policy=policy, device_mesh=mesh)


# wrap(module, mesh, optimizer), and how the optimizer is made.
WRAPPED = {
    "DDP": (lambda m, *_: md.DistributedDataParallel(m), sgd),
    "torch's DDP": (lambda m, *_: DistributedDataParallel(m), sgd),
    "ZeRO-1": (lambda m, *_: md.DistributedDataParallel(m), zero),
    "ZeRO-2": (lambda m, _, optimizer: md.ShardedDataParallel(m, optimizer), zero),
    "fully_shard": (layerwise(md.fully_shard), sgd),
    "hybrid FSDP": (hybrid, sgd),
}


def on_a_mesh(name):
    """Three steps of two micro-batches on 2 x 2 ranks: loss, weights, logits."""
    wrap, optimizer_of = WRAPPED[name]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    one, own, documents = decoder(), decoder(), documents_of(29)
    states = optimizer_of(own) if optimizer_of is zero else None
    inner = wrap(own, mesh, states)
    model = md.ContextParallel(inner, process_group=mesh.get_group("context"))
    optimizer, single, pairs = states or sgd(model), sgd(one), []
    for step in range(3):
        optimizer.zero_grad()
        single.zero_grad()
        for part in range(2):
            data = [(*batch(4 * step + 2 * part + replica), documents) for replica in range(2)]
            losses = [alone(one, *each) / 2 for each in data]
            (sum(losses) / 2).backward()
            replica = mesh.get_local_rank("data")
            waits = step == 1 and part == 0 and hasattr(inner, "no_sync")
            with inner.no_sync() if waits else nullcontext():
                loss = model(*data[replica]) / 2
                loss.backward()
            pairs.append((loss.detach(), losses[replica].detach()))
        optimizer.step()
        single.step()
    # torch's DDP has a prefix.
    state = {key.removeprefix("module."): value for key, value in model.state_dict().items()}
    assert state.keys() == one.state_dict().keys()
    whole = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}
    pairs += [(whole[key], value) for key, value in one.state_dict().items()]
    tokens, _ = batch(9)
    with torch.no_grad():
        pairs.append((model(tokens), model.cut.take(one(tokens), mesh.get_local_rank("context"))))
    return worst(pairs)


@pytest.mark.parametrize("name", WRAPPED)
def test_a_mesh_of_data_and_context_trains_as_one_process_does(pools, name):
    far = pools(4)(on_a_mesh, name)
    assert max(far) < EXACT, far


def with_experts(own_axis):
    """Experts on all ranks of a sequence, or along an axis of their own."""
    torch.manual_seed(0)
    one, data = decoder(), batch()
    for layer in one.layers:
        layer.mlp = md.experts.MoE(48, 24, experts=8, k=2).double()
    own, group, mesh = copy.deepcopy(one), None, None
    if own_axis:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("experts", "context"))
        group = mesh.get_group("context")
    model = md.experts.parallelize(own, mesh)
    model = md.DistributedDataParallel(model) if own_axis else model
    usual(md.ContextParallel(model, process_group=group), *data)
    alone(one, *data).backward()
    found = [(a.grad, b.grad) for a, b in zip(own.parameters(), one.parameters(), strict=True)]
    return worst((a.full_tensor() if hasattr(a, "full_tensor") else a, b) for a, b in found)


@pytest.mark.parametrize("own_axis", [False, True])
def test_experts_beside_it(pools, own_axis):
    far = pools(4)(with_experts, own_axis)
    assert max(far) < EXACT, far


# ---- layers that are computed again ---------------------------------------------------------


class Again(nn.Module):
    def __init__(self, layer, reentrant):
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, *xs):
        return checkpoint(self.layer, *xs, use_reentrant=self.reentrant)


REENTRANT, NOT = (partial(Again, reentrant=each) for each in (True, False))
AGAIN = {"not reentrant": NOT, "reentrant": REENTRANT, "ours": md.checkpoint_wrapper}


def again(kind):
    model = decoder()
    model.layers = nn.ModuleList(map(AGAIN[kind], model.layers))
    return model


def two_before_backward(kind, way, own_loss, added):
    """Two forward passes, of other lengths, before the first backward pass."""
    one, own, losses = decoder(), again(kind), []
    model = md.ContextParallel(own, way)
    for length in (29, 12):
        inputs, targets = batch(length=length)
        documents = documents_of(length)
        if own_loss:  # of this rank's logits: what DDP averages
            logits = model(inputs, documents=documents).flatten(0, 1)
            mine = model.cut.take(targets, dist.get_rank()).flatten()
            loss = F.cross_entropy(logits, mine, reduction="sum")
            losses.append(loss * dist.get_world_size() / (targets != -100).sum())
        else:
            losses.append(model(inputs, targets, documents))
        alone(one, inputs, targets, documents).backward()
    for loss in [sum(losses)] if added else losses[::-1]:
        loss.backward()
    assert F.scaled_dot_product_attention is sdpa
    return worst(gradients(own, one))


@pytest.mark.parametrize("kind", AGAIN)
def test_layers_computed_again_attend_as_in_their_own_forward_pass(pools, kind):
    cases = [(kind, "ring", False, False), (kind, "ring", True, False)]
    if kind != "reentrant":  # which gives a parameter its gradient in two parts: DDP refuses that
        cases += [(kind, way, False, True) for way in cp.ATTENTION]
    assert pools(4)(off, two_before_backward, cases) == [{}] * 4


def test_an_error_in_backward_leaves_torchs_attention_in_place(pools):
    def run(kind):
        own = again(kind)
        own.layers[0].register_full_backward_hook(lambda *_: 1 / 0)
        said = raised(md.ContextParallel(own)(*batch()).backward)
        return said, F.scaled_dot_product_attention is sdpa

    for kind in AGAIN:
        assert pools(2)(run, kind) == [("ZeroDivisionError: division by zero", True)] * 2, kind


# ---- what training scripts do ---------------------------------------------------------------


def test_clipping_and_copies(pools):
    """A copy of the model within, as that of moving averages, evaluates alone."""

    def run():
        one, model, (inputs, targets) = decoder(), md.ContextParallel(decoder()), batch()
        alone(one, inputs, targets).backward()
        model(inputs, targets).backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, one)]
        pairs = [norms, *gradients(model, one)]
        pairs.append((copy.deepcopy(model)(inputs, targets), model(inputs, targets)))
        if dist.get_rank() == 1:
            with torch.no_grad():
                pairs.append((copy.deepcopy(model.module)(inputs), one(inputs)))
        return worst(pairs)

    assert max(pools(3)(run)) < EXACT


def test_bfloat16_by_autocast_is_near(pools):
    def run(way):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_and_gradient(way, True, lambda: decoder().float())

    for way in cp.ATTENTION:
        for loss, gradient in pools(4)(run, way):
            assert loss < 0.01 and gradient < 0.1


def watched(summed):
    model = md.ContextParallel(decoder())
    optimizer = torch.optim.Adam(model.parameters())

    def loss(module, pair):
        count = (pair[1] != -100).sum()
        return alone(module, *pair) * count, count

    watch = md.watch(model, optimizer, bare=decoder, loss=loss, sources=[0])
    for step in range(2):
        with watch([batch(step)]):
            optimizer.zero_grad()
            (usual if summed else not_summed)(model, *batch(step))
            optimizer.step()


def test_watch_says_nothing_of_a_right_loop_and_finds_gradients_that_are_not_summed(pools):
    assert pools(4)(raised, watched, True) == [None] * 4
    told = pools(4)(raised, watched, False)
    assert all(each.startswith("SilentError") for each in told), told


def not_summed(model, *data):
    with model.no_sync():
        return usual(model, *data)


# ---- bad input ------------------------------------------------------------------------------


WIDTH = 260  # 1 / WIDTH**0.5 is not WIDTH**-0.5, by a bit


def attends(**options):
    """A model that calls attention with these options."""

    class Attends(nn.Embedding):
        def forward(self, tokens, positions):
            q = super().forward(tokens)[:, None]
            return F.scaled_dot_product_attention(q, q, q, **options)[:, 0] if options else q[:, 0]

    return Attends(256, WIDTH)


def step(model=None, documents=None, length=12, **options):
    data = batch(length=length)
    usual(md.ContextParallel(model or decoder(), **options), *data, documents)


def other_on_rank_3(which, other):
    data = list(batch(length=12))
    if dist.get_rank() == 3:
        data[which] = other[which]
    md.ContextParallel(decoder())(*data)


def along_data_only(wrap):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    step(wrap(decoder(), mesh["data"]), process_group=mesh.get_group("context"))


def ddp(model, mesh):
    return md.DistributedDataParallel(model, process_group=mesh.get_group())


def sharded(model, mesh):
    return md.FullyShardedDataParallel(model, device_mesh=mesh)


REFUSED = {
    "ValueError: 4 ranks cannot share 6 heads and 6 of keys evenly": lambda: step(
        md.zoo.Decoder(width=24, heads=6, kv_heads=6), attention="ulysses"
    ),
    "ValueError: 3 tokens cannot be cut over 4 ranks": lambda: step(length=3),
    "ValueError: tokens are (": lambda: md.ContextParallel(decoder())(
        batch(length=12)[0][:, :-1], batch(length=12)[1]
    ),
    "ValueError: documents are (12,), one": lambda: step(documents=documents_of(11)),
    "cut tokens with a mask and no causality": lambda: step(attends(attn_mask=torch.ones(3, 3))),
    "cut tokens with dropout": lambda: step(attends(is_causal=True, dropout_p=0.1)),
    "cut tokens with a scale of its own": lambda: step(attends(is_causal=True, scale=1.0)),
    "RuntimeError: the module never called F.scaled_dot": lambda: step(attends()),
    "ContextParallel: no dropout": lambda: step(nn.Sequential(nn.Dropout(0.1))),
    "ranks [0, 1, 2, 3] share a sequence, but were given other tokens": lambda: other_on_rank_3(
        0, batch(1, 12)
    ),
    "ranks [0, 1, 2, 3] share a sequence, but were given other targets": lambda: other_on_rank_3(
        1, batch(1, 12)
    ),
    "share a sequence, but gradients are averaged over [": lambda: along_data_only(ddp),
    "a sequence, but gradients are averaged over [": lambda: along_data_only(sharded),
}


def test_what_would_be_wrong_is_refused_on_every_rank(pools):
    for said, function in REFUSED.items():
        told = pools(4)(raised, function)
        assert all(each and said in each for each in told), (said, told)
