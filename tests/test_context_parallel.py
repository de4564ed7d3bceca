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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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


# ---- whole models ---------------------------------------------------------------------------


def batch(step=0, length=29, rows=2):
    inputs, targets = (x[step * rows :][:rows] for x in md.zoo.text(length))
    targets = targets.clone()
    targets[0, -(length // 3) :] = -100
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


def usual(model, inputs, targets, documents):
    """A step, up to its gradients: returns the loss."""
    loss = model(inputs, targets, documents)
    loss.backward()
    return loss.detach()


def losses_and_gradients(way, kind, several, make, step=usual):
    """How far the loss is off, and the worst of the gradients."""
    one, own = make(), make()
    inputs, targets = batch()
    documents = documents_of(29) if several else None
    wanted = alone(one, inputs, targets, documents)
    wanted.backward()
    model = md.ContextParallel(own, way, kind)
    loss = step(model, inputs, targets, documents)
    pairs = zip(own.parameters(), one.parameters(), strict=True)
    return float(apart(loss, wanted.detach())), worst((a.grad, b.grad) for a, b in pairs)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_losses_and_gradients_are_those_of_one_process(pools, gloo, ranks):
    kv_heads = {2: 4, 3: 6, 4: 2}[ranks]

    def run(cases):
        def far(*case):
            return max(losses_and_gradients(*case, make))

        found = {}
        for make in (lambda: decoder(kv_heads)), transformer:
            found |= off(far, cases)
        return found

    cases = list(product(cp.ATTENTION, cp.CUTS, [False, True]))
    assert pools(ranks)(run, cases) == [{}] * ranks
    if ranks == 3:
        assert gloo(run, [("ring", "zigzag", True)]) == [{}] * 3


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def zero(model):
    return md.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


def layerwise(shard):
    def wrap(model, *_):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in [*model.layers, model]:
            shard(part, mesh=mesh)
        return model

    return wrap


def fsdp(**options):
    policy = md.fully_sharded.by_class(md.zoo.DecoderLayer)
    return lambda m, mesh, _: md.FullyShardedDataParallel(m, auto_wrap_policy=policy, **options)


def turned(mesh):
    return DeviceMesh("cpu", mesh.mesh.T.contiguous(), mesh_dim_names=("context", "data"))


# wrap(module, mesh, optimizer), and how the optimizer is made: before or after.
WRAPPED = {
    "DDP": (lambda m, *_: md.DistributedDataParallel(m), sgd),
    "torch's DDP": (lambda m, *_: DistributedDataParallel(m), sgd),
    "ZeRO-1": (lambda m, *_: md.DistributedDataParallel(m), zero),
    "ZeRO-2": (lambda m, _, optimizer: md.ShardedDataParallel(m, optimizer), zero),
    "fully_shard": (layerwise(md.fully_shard), sgd),
    "torch's fully_shard": (layerwise(torch_fully_shard), sgd),
    "FSDP": (fsdp(), sgd),
    "hybrid FSDP": (lambda m, mesh, _: md.FullyShardedDataParallel(m, device_mesh=mesh), sgd),
    "sharded along data": (
        lambda m, mesh, _: md.FullyShardedDataParallel(m, device_mesh=turned(mesh)),
        sgd,
    ),
}


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def with_data_parallel(name, steps=3):
    """A few steps on 2 x 2 ranks: loss, weights, logits. Two micro-batches in a step."""
    wrap, optimizer_of = WRAPPED[name]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    one, own = decoder(), decoder()
    states = optimizer_of(own) if optimizer_of is zero else None
    inner = wrap(own, mesh, states)
    model = md.ContextParallel(inner, process_group=mesh.get_group("context"))
    optimizer, single = states or sgd(model), sgd(one)
    pairs = []
    for step in range(steps):
        for each in optimizer, single:
            each.zero_grad()
        for part in range(2):
            replicas = [batch(4 * step + 2 * part + replica) for replica in range(2)]
            losses = [alone(one, *each, documents_of(29)) / 2 for each in replicas]
            (sum(losses) / 2).backward()
            mine = mesh.get_local_rank("data")
            waits = step == 1 and part == 0 and hasattr(inner, "no_sync")
            with inner.no_sync() if waits else contextlib.nullcontext():
                loss = model(*replicas[mine], documents_of(29)) / 2
                loss.backward()
            pairs.append((loss.detach(), losses[mine].detach()))
        optimizer.step()
        single.step()
    state = model.state_dict()
    names = {key.removeprefix("module.") for key in state}  # torch's DDP keeps its own
    assert names == set(one.state_dict()), names
    state = {key.removeprefix("module."): whole(value) for key, value in state.items()}
    pairs += [(state[key], value) for key, value in one.state_dict().items()]
    tokens, _ = batch(9)
    with torch.no_grad():
        pairs.append((model(tokens), model.cut.take(one(tokens), mesh.get_local_rank("context"))))
    return worst(pairs)


@pytest.mark.parametrize("name", WRAPPED)
def test_a_mesh_of_data_and_context_trains_as_one_process_does(pools, name):
    far = pools(4)(with_data_parallel, name)
    assert max(far) < EXACT, far


# ---- layers that are computed again ---------------------------------------------------------


class Again(nn.Module):
    def __init__(self, layer, reentrant):
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, *xs):
        return checkpoint(self.layer, *xs, use_reentrant=self.reentrant)


AGAIN = {
    "not reentrant": lambda layer: Again(layer, False),
    "reentrant": lambda layer: Again(layer, True),
    "ours": md.checkpoint_wrapper,
}


def two_before_backward(again, way, own_loss, added):
    """Two forward passes, of other lengths, before the first backward pass."""
    one, own = decoder(), decoder()
    own.layers = nn.ModuleList(map(AGAIN[again], own.layers))
    model = md.ContextParallel(own, way)
    losses = []
    for length in (29, 12):
        inputs, targets = batch(length=length)
        losses.append(model(inputs, targets, documents_of(length)))
        if own_loss:  # of this rank's logits: what DDP averages
            logits = model(inputs, documents=documents_of(length)).flatten(0, 1)
            mine = model.cut.take(targets, dist.get_rank()).flatten()
            loss = F.cross_entropy(logits, mine, reduction="sum")
            losses[-1] = loss * dist.get_world_size() / (targets != -100).sum()
        alone(one, inputs, targets, documents_of(length)).backward()
    for loss in [sum(losses)] if added else losses[::-1]:
        loss.backward()
    assert F.scaled_dot_product_attention is sdpa
    return worst((a.grad, b.grad) for a, b in zip(own.parameters(), one.parameters(), strict=True))


@pytest.mark.parametrize("again", AGAIN)
def test_layers_computed_again_attend_by_their_own_forward_pass(pools, again):
    cases = [(again, "ring", False, False), (again, "ring", True, False)]
    if again != "reentrant":  # which gives a parameter its gradient in two parts: DDP refuses that
        cases += [(again, way, False, True) for way in cp.ATTENTION]
    assert pools(4)(off, two_before_backward, cases) == [{}] * 4


def test_an_error_in_backward_leaves_torchs_attention_in_place(pools):
    def run(again):
        own = decoder()
        own.layers = nn.ModuleList(map(AGAIN[again], own.layers))
        model = md.ContextParallel(own)
        before = []
        own.layers[0].register_full_backward_hook(lambda *_: 1 / 0)
        loss = model(*batch())
        before.append(raised(loss.backward))
        return before, F.scaled_dot_product_attention is sdpa

    for again in AGAIN:
        found = pools(2)(run, again)
        assert found == [(["ZeroDivisionError: division by zero"], True)] * 2, again


# ---- what training scripts do ---------------------------------------------------------------


def test_gradients_are_clipped_by_the_norm_of_one_process(pools):
    def run():
        one, model = decoder(), md.ContextParallel(decoder())
        inputs, targets = batch()
        alone(one, inputs, targets).backward()
        model(inputs, targets).backward()
        norms = (nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, one))
        pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), one.parameters())]
        return worst([tuple(norms), *pairs])

    assert max(pools(3)(run)) < EXACT


def test_a_copy_evaluates_alone(pools):
    """As that of moving averages."""

    def run():
        model = md.ContextParallel(decoder())
        inputs, targets = batch()
        model(inputs, targets).backward()
        copied, bare = copy.deepcopy(model), copy.deepcopy(model.module)
        found = [(copied(inputs, targets), model(inputs, targets))]
        if dist.get_rank() == 1:
            with torch.no_grad():
                found.append((bare(inputs), decoder()(inputs)))
        return worst(found)

    assert max(pools(2)(run)) < EXACT


def test_bfloat16_by_autocast_is_near(pools):
    def run(way):
        model, (inputs, targets) = md.ContextParallel(decoder().float(), way), batch()
        one = decoder().float()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(inputs, targets)
        loss.backward()
        wanted = alone(one, inputs, targets)
        wanted.backward()
        pairs = zip(model.parameters(), one.parameters(), strict=True)
        return loss.dtype, float(apart(loss, wanted)), worst((a.grad, b.grad) for a, b in pairs)

    for way in cp.ATTENTION:
        for dtype, loss, gradient in pools(4)(run, way):
            assert dtype == torch.float32 and loss < 0.01 and gradient < 0.1


def watched(summed):
    model = md.ContextParallel(decoder())
    optimizer = torch.optim.Adam(model.parameters())

    def loss(bare, pair):
        logits = bare(pair[0]).flatten(0, 1)
        count = (pair[1] != -100).sum()
        return F.cross_entropy(logits, pair[1].flatten(), reduction="sum"), count

    watch = md.watch(model, optimizer, bare=decoder, loss=loss, sources=[0])
    for step in range(3):
        inputs, targets = batch(step)
        with watch([(inputs, targets)]):
            optimizer.zero_grad()
            with contextlib.nullcontext() if summed else model.no_sync():
                model(inputs, targets).backward()
            optimizer.step()


def test_watch_says_nothing_of_a_right_loop_and_finds_gradients_that_are_not_summed(pools):
    assert pools(4)(raised, watched, True) == [None] * 4
    told = pools(4)(raised, watched, False)
    assert all(each.startswith("SilentError") for each in told), told
