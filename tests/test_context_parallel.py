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


# ---- bugs that public programs had, put in ---------------------------------------------------


def by_means(labels_of):
    """A step with targets of one's own, and a mean over them, averaged over the ranks."""

    def step(model, inputs, targets, documents):
        logits = model(inputs, documents=documents).flatten(0, 1)
        labels = labels_of(model.cut, inputs, targets)
        loss = F.cross_entropy(logits, labels.flatten())
        loss.backward()
        total = loss.detach() / dist.get_world_size()
        dist.all_reduce(total)
        return total

    return step


def own(cut, inputs, targets):
    return cut.take(targets, dist.get_rank())


def shifted(cut, inputs, targets):
    return F.pad(cut.take(inputs, dist.get_rank())[:, 1:], (0, 1), value=-100)


def averaged(model, inputs, targets, documents):
    loss = model(inputs, targets, documents)
    (loss / dist.get_world_size()).backward()
    return loss.detach()


def not_summed(model, *data):
    with model.no_sync():
        return usual(model, *data)


def local_positions(self, rank):
    return torch.arange(len(self.positions[rank]))


def by_index(self, to, of):
    ranges = (slice(0, len(self.positions[each])) for each in (to, of))
    return Block(*ranges, causal=True)


def zero_sums(q, k, v, block):
    q, (k, v) = q[:, :, block.rows], (x[:, :, block.columns] for x in (k, v))
    return kernel._flash(q, k, v, 0.0, block.causal, attn_mask=kernel._bias(block, q))


def own_sums(dout, q, k, v, out, lse, block, honest=kernel.backward):
    out, lse = torch.zeros_like(out), lse.clone()
    out[:, :, block.rows], lse[:, :, block.rows] = kernel.forward(q, k, v, block)
    return honest(dout, q, k, v, out, lse, block)


def forgotten(self, to, of, honest=Cut.block):
    return honest(Cut(self.positions), to, of)


def in_turn(x, n, dim):
    return torch.cat([x] * n, dim)


# The bug: a step, or what is patched by what; where it is seen: way, cut, documents; and in what:
# the loss too, or the gradients alone.
BUGS = {
    "positions of each rank": ((Cut, "in_document", local_positions), "ring zigzag", True),
    "a mean of means": (by_means(own), "ring zigzag", True),
    "targets shifted after the cut": (by_means(shifted), "ring zigzag", True),
    "gradients averaged": (averaged, "ring zigzag", False),
    "gradients not summed": (not_summed, "ring zigzag", False),
    "documents forgotten": ((Cut, "block", forgotten), "ring zigzag documents", True),
    "backward by a block's own sums": ((kernel, "backward", own_sums), "ring zigzag", False),
    "causal by local index": ((Cut, "block", by_index), "ring zigzag", True),
    "a key unseen weighs exp(0)": ((kernel, "forward", zero_sums), "ring striped documents", True),
    "heads of keys in turn": ((torch.Tensor, "repeat_interleave", in_turn), "ulysses zigzag", True),
}
# Where nothing is to be seen: one document hides the mask, and half a row of padding the means.
BLIND = {
    "documents forgotten": "ring zigzag",
    "a key unseen weighs exp(0)": "ring zigzag documents",
    "heads of keys in turn": "ring zigzag",
}


def with_bug(bug, where):
    way, kind, *several = where.split()
    broken = BUGS[bug][0]
    patched = mock.patch.object(*broken) if isinstance(broken, tuple) else contextlib.nullcontext()
    step = usual if isinstance(broken, tuple) else broken
    with patched:
        return losses_and_gradients(way, kind, bool(several), decoder, step)


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_seen(pools, bug):
    _, where, in_loss = BUGS[bug]
    found = pools(4)(with_bug, bug, where)
    assert (max(loss for loss, _ in found) > 1e-4) is in_loss, found
    assert max(gradient for _, gradient in found) > 1e-2, found
    if not in_loss:
        assert max(loss for loss, _ in found) < EXACT
    if bug in BLIND:
        assert max(max(each) for each in pools(4)(with_bug, bug, BLIND[bug])) < EXACT


def test_half_a_row_of_padding_hides_a_mean_of_means(pools):
    def run():
        inputs, targets = batch(length=32)
        targets[0] = inputs[0]
        targets[0, 16:] = -100
        loss = by_means(own)(md.ContextParallel(decoder()), inputs, targets, None)
        return float(apart(loss, alone(decoder(), inputs, targets).detach()))

    assert max(pools(4)(run)) < EXACT


# ---- bad input ------------------------------------------------------------------------------


def attends(**options):
    """A model that calls attention with these options."""

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(256, 8)

        def forward(self, tokens, positions):
            q = self.tokens(tokens)[:, None]
            return F.scaled_dot_product_attention(q, q, q, **options)[:, 0]

    return Attends()


class NoAttention(nn.Embedding):
    def forward(self, tokens, positions):
        return super().forward(tokens)


def step(model=None, tokens=None, targets=None, documents=None, **options):
    inputs, usual = batch(length=12)
    model = md.ContextParallel(decoder() if model is None else model, **options)
    model(inputs if tokens is None else tokens, usual if targets is None else targets, documents)


def other_group():
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    step(process_group=groups[0])


def over_data_only(wrap):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    step(wrap(decoder(), mesh["data"]), process_group=mesh.get_group("context"))


def here(usual, on_one):
    return on_one if dist.get_rank() == 3 else usual


def tokens_of(rank_3):
    return here(batch(length=12)[0], rank_3)


REFUSED = {
    "too few heads": (
        lambda: step(md.zoo.Decoder(heads=6, width=24, kv_heads=6), attention="ulysses"),
        "ValueError: 4 ranks cannot share 6 heads and 6 of keys evenly",
    ),
    "fewer tokens than ranks": (
        lambda: step(tokens=torch.zeros(2, 3).long(), targets=torch.zeros(2, 3).long()),
        "ValueError: 3 tokens cannot be cut over 4 ranks",
    ),
    "a mask": (
        lambda: step(attends(attn_mask=torch.ones(3, 3))),
        "NotImplementedError: attention over cut tokens with a mask and no causality",
    ),
    "dropout in attention": (
        lambda: step(attends(is_causal=True, dropout_p=0.1)),
        "NotImplementedError: attention over cut tokens with dropout",
    ),
    "dropout": (
        lambda: step(nn.Sequential(nn.Dropout(0.1))),
        "NotImplementedError: ContextParallel: no dropout",
    ),
    "not causal": (lambda: step(attends()), "with no causality"),
    "a scale": (lambda: step(attends(is_causal=True, scale=1.0)), "with a scale of its own"),
    "a rank outside": (other_group, "ValueError: ContextParallel: rank 2 is not in the process"),
    "another T on a rank": (
        lambda: step(tokens=tokens_of(torch.zeros(2, 11).long())),
        "ValueError: ranks 0 and 3 share a sequence, but were given other tokens",
    ),
    "other tokens on a rank": (
        lambda: step(tokens=tokens_of(batch(1, 12)[0])),
        "ValueError: ranks 0 and 3 share a sequence, but were given other tokens",
    ),
    "other targets on a rank": (
        lambda: step(targets=here(batch(length=12)[1], batch(1, 12)[1])),
        "ValueError: ranks 0 and 3 share a sequence, but were given other targets",
    ),
    "documents of another length": (
        lambda: step(documents=documents_of(11)),
        "ValueError: documents are (12,), one number a token, not (11,)",
    ),
    "a DDP along data": (
        lambda: over_data_only(
            lambda m, mesh: md.DistributedDataParallel(m, process_group=mesh.get_group())
        ),
        "share a sequence, but gradients are averaged over [",
    ),
    "sharded along data": (
        lambda: over_data_only(lambda m, mesh: md.FullyShardedDataParallel(m, device_mesh=mesh)),
        "share a sequence, but gradients are averaged over [",
    ),
    "no attention": (
        lambda: step(NoAttention(256, 8)),
        "RuntimeError: the module never called F.scaled_dot_product_attention",
    ),
    "another attention on a rank": (
        lambda: step(attention=here("ring", "ulysses")),
        "ValueError: the ranks disagree about attention: rank 0 says ring, rank 3 says ulysses",
    ),
    "an unknown cut": (lambda: step(cut="mean"), "ValueError: cut must be one of contiguous"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_wrong_is_refused_on_every_rank(pools, what):
    function, said = REFUSED[what]
    told = pools(4)(raised, function)
    if what == "a rank outside":
        told = told[2:3]
    assert all(each and said in each for each in told), told


def test_there_must_be_a_group():
    with pytest.raises(RuntimeError, match=r"ContextParallel works within a process group"):
        md.ContextParallel(decoder())
