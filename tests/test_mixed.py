"""Data, pipeline and tensor parallelism on one mesh train as one process does."""

import copy
from functools import partial
from math import prod

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_plan import raised
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import minidist as md
from minidist import tensor_parallel as tp
from minidist.common.tensors_in import local_of
from minidist.mixed import AXES, MixedParallel, mesh, traffic_by_axis

ALL = 2, 2, 2  # data, pipeline, tensor
LENGTH = 6


@pytest.fixture(scope="module")
def gloo():
    """Eight ranks over gloo; all others are over shm."""
    with md.ranks(8, backend="gloo") as pool:
        yield pool


def apart(found):
    """What differs from what it should be: names, and by how much."""
    differences = {
        name: md.parity.relative_difference(torch.as_tensor(ours), torch.as_tensor(wanted))
        for name, (ours, wanted) in found.items()
    }
    return [f"{name}: {d:.1e}" for name, d in differences.items() if not d <= 1e-12]


def transformer(tied=True, length=LENGTH):
    """Of a vocabulary of 257 tokens, so that two ranks have different numbers of them."""
    model = md.zoo.Transformer(257, length, width=8, heads=2, layers=3).double()
    if not tied:
        model.head.weight = nn.Parameter(2 * model.head.weight.detach())
    return model


def batch(step, rows=8, length=LENGTH):
    inputs, targets = md.zoo.text(length)
    return inputs[step * rows :][:rows], targets[step * rows :][:rows]


class Layer(nn.Module):
    """A layer of one's own."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def own_layers():
    torch.manual_seed(0)
    ends = nn.Embedding(257, 8), nn.Linear(8, 257)
    return nn.Sequential(ends[0], Layer(), Layer(), nn.LayerNorm(8), ends[1]).double()


OWN_PLAN = {
    "[04]": "vocabulary",
    "[12].norm": "sequence",
    "[12].up": "columns",
    "[12].down": "rows",
    "3": "sequence",
}


ATTENTION = {
    "tokens": "vocabulary",
    "blocks.*": tp.heads("heads"),
    "blocks.*.qkv": tp.qkv(2),
    "blocks.*.out": "rows",
    "head": "vocabulary",
}


def of_experts(tied=True, aux=0.0, eight=8):
    """Three blocks, each with eight experts, of which a token takes two."""
    model = transformer(tied)
    torch.manual_seed(0)
    for block in model.blocks:
        block.mlp = md.experts.MoE(8, 12, eight, k=2, sigmoid=True, aux=aux).double()
    return model


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def zero(model):
    group = model.mesh.get_group("data")
    return md.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, lr=1e-3, process_group=group
    )


def train(
    sizes,
    tied=True,
    norm_type=2.0,
    order=AXES,
    shares=None,
    steps=2,
    rows=8,
    make=None,
    opt=adam,
    context=1,
    experts=1,
    length=LENGTH,
    padding=0,
    **options,
):
    """Adam with clipping, beside one process: the loss, the norm, and all weights at each step.
    Each replica has rows of its own, and so has each rank along experts. Returns what differs."""
    make = make or (
        partial(of_experts, tied) if experts > 1 else partial(transformer, tied, length)
    )
    dense = make()
    of_rank_0 = [p for p in dense.parameters() if p.ndim == 1][-1]
    if dist.get_rank() == 0:
        of_rank_0.data += 1  # all ranks take it
    whole = mesh(*sizes, order=order, context=context, experts=experts)
    model = MixedParallel(copy.deepcopy(dense), whole, 2, **options)
    if dist.get_rank() > 0:
        of_rank_0.data += 1
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    optimizer, alone = opt(model), adam(dense)
    replica, replicas = whole.get_local_rank("data"), whole["data"].size()
    if experts > 1:
        replica, replicas = replica * experts + whole.get_local_rank("experts"), replicas * experts
    for step in range(steps):
        inputs, targets = batch(step, rows, length)
        targets = targets.index_fill(1, torch.arange(length - padding, length), -100)
        own = slice(replica, None, replicas) if shares is None else shares[replica]
        optimizer.zero_grad()
        alone.zero_grad()
        loss = model.train_step(inputs[own], targets[own], model.cross_entropy)
        wanted = md.parity.cross_entropy(dense(inputs), targets)
        wanted.backward()
        norm = model.clip_grad_norm_(0.05, norm_type)
        expected = nn.utils.clip_grad_norm_(dense.parameters(), 0.05, norm_type)
        assert expected > 0.1  # it does clip
        optimizer.step()
        alone.step()
        for each in (model, dense) if experts > 1 else ():
            md.experts.update_bias(each, 0.01)
        state, full = dense.state_dict(), model.full_state_dict()
        found = apart({"loss": (loss, wanted), "norm": (norm, expected)})
        found += apart({name: (full[name], tensor) for name, tensor in state.items()})
        found += ["names"] * (list(full) != list(state))
        found += [f"{k} stays" for k, v in before.items() if torch.equal(v, full[k])]
        tp.check_replicas(model.module, whole.get_group("tensor"))
        found += [f"step {step}"] if found else []
        if found:
            return found
    return []


# ---- training -----------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)])
def test_axes_train_as_one_process_does(pools, sizes):
    assert pools(4)(train, sizes) == [[]] * 4


def test_all_three_train_as_one_process_does(pools, gloo):
    assert pools(8)(train, ALL) == [[]] * 8
    assert gloo(train, ALL, tied=False, sequence_parallel=True, norm_type=float("inf")) == [[]] * 8


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2, 2, 1), {"shares": [slice(0, 3), slice(3, 8)]}),  # replicas of 3 rows, and of 5
        ((2, 1, 2), {"tied": False, "order": ("tensor", "pipeline", "data")}),
        ((1, 2, 2), {"schedule": "interleaved", "sequence_parallel": True}),
        ((1, 2, 2), {"schedule": "gpipe", "recompute": True, "balance": [4, 2]}),
        ((1, 2, 2), {"schedule": "zero_bubble", "order": ("tensor", "data", "pipeline")}),
    ],
)
def test_options_of_the_parts(pools, sizes, options):
    assert pools(4)(train, sizes, **options) == [[]] * 4


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2, 1, 1), {"padding": 4}),  # none of rank 1's tokens has a target
        ((2, 1, 1), {"shares": [slice(0, 3), slice(3, 8)], "order": ("context", *AXES)}),
        ((1, 2, 1), {"recompute": True, "length": 7}),
        ((2, 1, 1), {"tied": False, "shard": md.FullyShardedDataParallel, "length": 7}),
        ((1, 1, 2), {"sequence_parallel": True, "length": 8}),
    ],
)
def test_ranks_along_context_share_the_tokens_of_each_row(pools, sizes, options):
    assert pools(4)(train, sizes, context=2, **options) == [[]] * 4


def test_context_beside_pipeline_and_tensor(pools):
    assert pools(8)(train, (1, 2, 2), context=2, length=7) == [[]] * 8


def sharded(stage, device_mesh):
    own = set(md.experts.parameters(stage))
    return md.fully_shard(stage, mesh=device_mesh, ignored_params=own)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 1, 1), {"experts": 4}),
        ((2, 1, 1), {"shares": [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 9)], "rows": 9}),
        ((1, 2, 1), {"recompute": True, "balance": [4, 2]}),
        ((1, 2, 1), {"schedule": "interleaved", "norm_type": float("inf")}),
        ((1, 2, 1), {"schedule": "zero_bubble"}),
        ((1, 1, 2), {"plan": ATTENTION}),
        ((1, 1, 1), {"context": 2, "order": ("context", "experts", *AXES)}),
        ((2, 1, 1), {"tied": False, "shard": sharded}),
        ((1, 2, 1), {"tied": False, "shard": sharded, "schedule": "gpipe"}),
    ],
)
def test_ranks_along_experts_have_other_rows_and_other_experts(pools, sizes, options):
    assert pools(4)(train, sizes, **{"experts": 2, **options}) == [[]] * 4


def test_experts_beside_the_other_axes(pools):
    assert pools(8)(train, (1, 2, 1), context=2, experts=2) == [[]] * 8
    assert pools(8)(train, (2, 1, 2), experts=2, plan=ATTENTION) == [[]] * 8


def test_the_auxiliary_loss_is_the_mean_over_the_micro_batches(pools):
    """In one process: of each micro-batch of all ranks together, a half."""

    def run():
        dense, whole = of_experts(aux=1.0), mesh(pipeline=2, experts=2)
        model, own = MixedParallel(copy.deepcopy(dense), whole, 2), whole.get_local_rank("experts")
        inputs, targets = batch(0)
        model.train_step(inputs[own::2], targets[own::2], model.cross_entropy)
        for block in dense.blocks:
            block.mlp.aux = 0.5
        for rows in slice(0, 4), slice(4, 8):
            (md.parity.cross_entropy(dense(inputs[rows]), targets[rows]) / 2).backward()
        ours = {
            n: p.grad for n, p in model.module.named_parameters() if not hasattr(p, "placements")
        }
        wanted = dict(dense.named_parameters(remove_duplicate=False))
        return apart({name: (grad, wanted[name].grad) for name, grad in ours.items()})

    assert pools(4)(run) == [[]] * 4


def test_layers_of_ones_own_by_a_plan(pools):
    options = dict(make=own_layers, plan=OWN_PLAN, sequence_parallel=True)
    assert pools(8)(train, ALL, **options) == [[]] * 8


class Placed(nn.Module):
    """Tokens, each at its place in the row."""

    def __init__(self, tokens, places):
        super().__init__()
        self.tokens, self.places = tokens, places

    def forward(self, x):
        return self.tokens(x) + self.places


class OwnParameter(nn.Module):
    """A parameter of its own is in a layer that `sequential()` makes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(257, 8), nn.Parameter(torch.randn(LENGTH, 8))
        self.head = nn.Linear(8, 257)

    def sequential(self):
        return nn.Sequential(Placed(self.tokens, self.places), nn.Tanh(), self.head)

    def forward(self, x):
        return self.sequential()(x)


def test_a_parameter_that_no_layer_of_the_model_has(pools):
    assert pools(4)(train, (2, 2, 1), make=lambda: OwnParameter().double()) == [[]] * 4


def held(opt, **options):
    """Elements of this rank's parameters, and of Adam's states."""
    model = MixedParallel(transformer(tied=False), mesh(*ALL), 2, **options)
    optimizer = opt(model)
    model.train_step(*batch(0), model.cross_entropy)
    optimizer.step()
    states = [s for each in optimizer.state.values() for s in each.values() if s.ndim]
    return tuple(sum(local_of(t).numel() for t in each) for each in (model.parameters(), states))


def test_optimizer_states_are_sharded_along_data(pools):
    assert pools(8)(train, ALL, opt=zero) == [[]] * 8
    for parameters, states in pools(8)(held, zero):  # two moments of each parameter, by halves
        assert states < 0.55 * 2 * parameters


def test_stages_are_fully_sharded_along_data(pools):
    shard = md.FullyShardedDataParallel
    options = dict(schedule="gpipe", sequence_parallel=True)  # replicas of 3 rows, and of 4
    options |= dict(rows=7, shares=[slice(0, 3), slice(3, 7)])
    assert pools(8)(train, ALL, tied=False, shard=shard, **options) == [[]] * 8
    whole = sum(p.numel() for p in transformer(False).parameters())
    every = [parameters for parameters, _ in pools(8)(held, adam, shard=shard)]
    assert sum(every) < 1.1 * whole  # norms and some biases are on both along tensor


class Skipped(nn.Module):
    """A layer that a step may leave out."""

    def __init__(self):
        super().__init__()
        self.linear, self.used = nn.Linear(8, 8), True

    def forward(self, x):
        return x + self.linear(x).tanh() if self.used else x


def test_a_layer_that_some_replicas_leave_out(pools):
    """Elsewhere its gradient counts as zero; where no replica uses it, it stays as it is."""

    def run():
        torch.manual_seed(0)
        dense = nn.Sequential(nn.Embedding(257, 8), Skipped(), nn.Linear(8, 257)).double()
        whole = mesh(data=2)
        model = MixedParallel(copy.deepcopy(dense), whole, 2)
        optimizer, alone = adam(model), adam(dense)
        replica, found = whole.get_local_rank("data"), []
        for step, used_by in enumerate([{0}, {1}, {0, 1}, {}, {1}]):
            optimizer.zero_grad()
            alone.zero_grad()
            inputs, targets = batch(step)
            for each in range(2):
                dense[1].used = each in used_by
                outputs = dense(inputs[each::2])
                (md.parity.cross_entropy(outputs, targets[each::2]) / 2).backward()
            model.module[1].used = replica in used_by
            model.train_step(inputs[replica::2], targets[replica::2], model.cross_entropy)
            optimizer.step()
            alone.step()
            full, state = model.full_state_dict(), dense.state_dict()
            found += apart({f"{name} {step}": (full[name], t) for name, t in state.items()})
        return found

    assert pools(2)(run) == [[]] * 2


def test_replicas_take_the_buffers_of_the_first(pools):
    def run():
        torch.manual_seed(0)
        layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        first = nn.Sequential(*layers).double()  # by itself, on the first replica's rows
        whole = mesh(data=2, pipeline=2)
        model = MixedParallel(copy.deepcopy(first), whole, 1)
        replica, found = whole.get_local_rank("data"), []
        for step in range(3):
            x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(step)).double()
            model.train_step(x[replica], x[replica], lambda y, t: y[:, :6].sub(t).square().mean())
            first(x[0])
            full = model.full_state_dict()
            found += apart({f"{n} {step}": (full[n], b) for n, b in first.named_buffers()})
        if replica == 1:  # one replica alone
            found += apart({"outputs": (model.eval()(x[1]), first.eval()(x[1]))})
        return found

    assert pools(4)(run) == [[]] * 4


# ---- what a rank has ----------------------------------------------------------------------


def names_held():
    model = MixedParallel(transformer(), mesh(*ALL), 2)
    return set(model.state_dict()), sum(p.numel() for p in model.parameters())


def test_a_rank_holds_its_features_of_its_layers_by_the_models_names(pools):
    every, held = set(transformer().state_dict()), pools(8)(names_held)
    first, last = held[0][0], held[2][0]  # ranks 0 and 1 are one stage, 2 and 3 the next
    assert first | last == every and not first & last
    assert {"tokens.weight", "blocks.0.qkv.weight"} <= first and "head.weight" in last
    whole = sum(p.numel() for p in transformer().parameters())
    assert all(count < whole / 2 for _, count in held)  # a quarter; a tied weight is there twice


@pytest.mark.parametrize("sizes", [(2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 2, 1), (1, 1, 1)])
def test_evaluation_gives_whole_outputs_on_every_rank(pools, sizes):
    def evaluate():
        dense, whole = transformer(), mesh(*sizes, context=4 // prod(sizes))
        model = MixedParallel(copy.deepcopy(dense), whole, 4).eval()
        inputs, _ = batch(whole.get_local_rank("data"), rows=3)  # fewer than micro-batches
        with torch.no_grad():
            found = apart({"outputs": (model(inputs), dense(inputs))})
        stages = model.pipeline.wrapped
        return found, any(m.training for stage in stages for m in stage.modules())

    assert pools(4)(evaluate) == [([], False)] * 4


@pytest.mark.parametrize("context", [1, 2])
def test_a_copy_is_on_the_same_mesh_and_has_values_of_its_own(pools, context):
    """As scripts keep a moving average of the weights."""

    def run():
        model = MixedParallel(transformer(), mesh(*ALL[context - 1 :], context=context), 2)
        copied, before = copy.deepcopy(model), model.full_state_dict()
        model.train_step(*batch(0), model.cross_entropy)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        found = apart({name: (t, before[name]) for name, t in copied.full_state_dict().items()})
        copied.train_step(*batch(0), copied.cross_entropy)
        torch.optim.SGD(copied.parameters(), lr=0.1).step()
        after = model.full_state_dict()
        return found + apart({n: (t, after[n]) for n, t in copied.full_state_dict().items()})

    assert pools(8)(run) == [[]] * 8


@pytest.mark.parametrize("there", [(1, 2, 2), (2, 1, 2)])
def test_a_checkpoint_of_one_mesh_loads_in_any_other_and_in_the_model(pools, there):
    def move():
        dense = transformer()
        model = MixedParallel(copy.deepcopy(dense), mesh(data=2, pipeline=2), 2)
        model.train_step(*batch(0), model.cross_entropy)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        full = model.full_state_dict()
        dense.load_state_dict(full)
        other = MixedParallel(transformer(), mesh(*there), 2)
        parameters = list(other.parameters())
        other.load_full_state_dict(full)
        kept = all(a is b for a, b in zip(parameters, other.parameters(), strict=True))
        own = MixedParallel(transformer(), mesh(*there), 2)
        own.load_state_dict(other.state_dict())
        inputs, _ = batch(1)
        found = apart({n: (t, full[n]) for n, t in other.full_state_dict().items()})
        found += apart({"whole": (other(inputs), dense(inputs))})
        found += apart({"own": (own(inputs), dense(inputs))})
        del full["norm.bias"], full["blocks.0.norm1.bias"]
        told = raised(other.load_full_state_dict, full)
        return found, kept, told.startswith("RuntimeError") and "bias" in told

    assert pools(4)(move) == [([], True, True)] * 4


def test_a_checkpoint_of_experts_loads_in_any_mesh_and_in_the_model(pools):
    def move():
        dense = of_experts()
        model = MixedParallel(of_experts(), mesh(pipeline=2, experts=2), 2)
        model.train_step(*batch(0), model.cross_entropy)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        full = model.full_state_dict()
        dense.load_state_dict(full)
        other = MixedParallel(of_experts(), mesh(data=2, experts=2), 2)
        other.load_full_state_dict(full)
        inputs, _ = batch(dist.get_rank())  # whose rows are its own
        with torch.no_grad():
            found = apart({"outputs": (other(inputs), dense(inputs))})
        copied = copy.deepcopy(other)
        other.train_step(*batch(0), other.cross_entropy)
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        return found + apart({n: (t, full[n]) for n, t in copied.full_state_dict().items()})

    assert pools(4)(move) == [[]] * 4


def test_ranks_along_tensor_are_neighbours_unless_order_says_otherwise(pools):
    def groups(**options):
        whole = mesh(*ALL, **options)
        return [dist.get_process_group_ranks(whole.get_group(axis)) for axis in AXES]

    assert pools(8)(groups)[5] == [[1, 5], [5, 7], [4, 5]]
    assert pools(8)(groups, order=["tensor", "pipeline", "data"])[5] == [[4, 5], [5, 7], [1, 5]]


# ---- traffic ------------------------------------------------------------------------------


def traffic(**options):
    """Of one step with 8 bytes a number, by axis; of the parameters: how many, and the bytes of
    all and of the tied table."""
    whole = mesh(*ALL)
    model = MixedParallel(transformer(), whole, 2, balance=[3, 3], **options)
    inputs, targets = batch(0, rows=4)
    model.train_step(inputs, targets, model.cross_entropy)  # the second is like all others
    with md.measure.TrafficCounter() as counter:
        model.train_step(inputs, targets, model.cross_entropy)
    own = list(model.parameters())
    table = sum(p.nbytes for p in own if p.shape[0] in (257, 128, 129))
    return traffic_by_axis(counter, whole), len(own), sum(p.nbytes for p in own), table


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_bytes_by_axis(pools, gloo, sequence_parallel):
    """The first stage has the embedding and two blocks, the last one block, the norm and the head.
    A micro-batch has 2 rows of 6 tokens, of 8 features."""
    activation = 2 * 6 * 8 * 8
    pool = gloo if sequence_parallel else pools(8)
    share = 2 if sequence_parallel else 1  # of the tokens, on each rank along tensor
    for rank, (axes, count, nbytes, table) in enumerate(
        pool(traffic, sequence_parallel=sequence_parallel)
    ):
        first = rank % 4 < 2
        # Activations or their gradients of two micro-batches, and the tied table's gradient, to
        # which a flag may be added.
        sends, sent = axes["pipeline"]["isend"]
        assert sends == 3 and 0 <= sent - 2 * activation / share - table <= 8

        # The rows; the gradients, all of them once, in a bucket; and the loss, whether it failed,
        # and which parameters have a gradient.
        assert axes["data"] == {"all_reduce": (3, 8 + nbytes + 8 * (2 + count))}

        tokens = 2 * 6 * 8  # bytes of one number for each
        if sequence_parallel:
            assert set(axes["tensor"]) <= {"all_gather", "reduce_scatter", "all_reduce"}
            if first:  # forward 2 a block, backward 2 a block; the embedding's forward
                assert axes["tensor"]["reduce_scatter"] == (2 * 9, 2 * 9 * activation)
        elif first:  # four a block, and one for the embedding
            assert axes["tensor"] == {"all_reduce": (2 * 9, 2 * 9 * activation)}
        else:  # four a block; the input of the head, backward; the loss: 12 + 4, and 24 numbers
            loss = tokens + 4 * 8 + 2 * tokens
            assert axes["tensor"] == {"all_reduce": (2 * 7, 2 * (5 * activation + loss))}


def traffic_with_context(data):
    whole = mesh(data=data, context=2)
    model = MixedParallel(transformer(), whole, 2)
    with md.measure.TrafficCounter() as counter:
        model.train_step(*batch(0, rows=4), model.cross_entropy)
    return traffic_by_axis(counter, whole), sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("data", [1, 2])
def test_bytes_along_context(pools, data):
    """Three blocks, two micro-batches of 2 rows of 6 tokens, of 8 features. Half of all keys and
    values leave a rank forward, twice as many backward."""
    keys = 2 * 6 * 8 * 8
    for axes, nbytes in pools(2 * data)(traffic_with_context, data):
        sent = sum(n for call, (_, n) in axes["context"].items() if call != "all_reduce")
        assert sent == 3 * 2 * (2 + 4) * keys / 2
        calls, summed = axes["replicas" if data > 1 else "context"]["all_reduce"]
        assert nbytes <= summed < nbytes + 1000 and calls == 3
        assert ("all_reduce" in axes["context"]) is (data == 1)


def traffic_of_experts(**axes):
    whole = mesh(**axes)
    model = MixedParallel(of_experts(), whole, 1)
    with md.measure.TrafficCounter() as counter:
        model.train_step(*batch(dist.get_rank(), rows=4), model.cross_entropy)
    plans = [block.mlp.plan for block in model.module.blocks]
    own = sum(local_of(p).nbytes for p in md.experts.parameters(model))
    return traffic_by_axis(counter, whole), sum(sum(map(sum, plan)) for plan in plans), own


@pytest.mark.parametrize(
    ("axes", "copies"),
    [({"data": 2}, "data"), ({"pipeline": 1}, None)],
)
def test_bytes_along_experts(pools, axes, copies):
    """Three layers of two tensors of 4 experts a rank. A row has 8 features; there and back, and so
    do the gradients. The counts of 8 experts go before."""
    nbytes = sum(p.nbytes for name, p in of_experts().named_parameters() if ".experts." not in name)
    for found, rows, own in pools(2 * prod(axes.values()))(traffic_of_experts, experts=2, **axes):
        assert found["experts"]["all_to_all"] == (3 * 5, 2 * rows * 64 + 3 * 8 * 8)
        assert own == 3 * 2 * 4 * 8 * 12 * 8
        summed = found["replicas" if copies else "experts"]["all_reduce"]
        assert summed[0] == 3 and nbytes < summed[1] < nbytes + 1000
        assert copies is None or found[copies] == {"all_reduce": (6, own)}


# ---- mistakes -----------------------------------------------------------------------------


WRONG_MESHES = {
    "too many": (
        lambda rank: {"data": 2, "tensor": 4},
        "ValueError: a mesh of data=2, pipeline=1, tensor=4 is for 8 ranks, and there are 4",
    ),
    "another on one rank": (
        lambda rank: {"data": 2, "tensor": 2} if rank < 3 else {"data": 4},
        "ValueError: the ranks disagree about data: rank 0 says 2, rank 3 says 4",
    ),
    "another order": (
        lambda rank: {"data": 4, "order": AXES if rank else AXES[::-1]},
        "the ranks disagree about order",
    ),
}


def test_a_mesh_that_does_not_fit_is_refused_on_every_rank(pools):
    for what, (arguments, said) in WRONG_MESHES.items():
        told = pools(4)(lambda arguments=arguments: raised(mesh, **arguments(dist.get_rank())))
        assert all(said in each for each in told), (what, told)


def build(sizes, make=transformer, microbatches=2, **options):
    MixedParallel(make(), mesh(*sizes), microbatches, **options)


def other_axes():
    MixedParallel(transformer(), init_device_mesh("cpu", (4,), mesh_dim_names=("data",)), 2)


def another_mesh_on_one_rank():
    orders = ("data", "pipeline", "tensor"), ("tensor", "pipeline", "data")
    whole = mesh(2, 1, 2)
    other = DeviceMesh("cpu", whole.mesh.T.contiguous(), mesh_dim_names=orders[1])
    MixedParallel(transformer(), other if dist.get_rank() == 3 else whole, 2)


WRONG_MODELS = {
    "experts over tokens that are cut": (
        lambda: MixedParallel(of_experts(), mesh(experts=2, tensor=2), 2, sequence_parallel=True),
        "ValueError: experts and sequence_parallel, which cuts tokens",
    ),
    "an expert on no rank": (
        lambda: MixedParallel(of_experts(eight=6), mesh(experts=4), 2),
        "ValueError: 6 experts cannot be shared by 4 ranks",
    ),
    "axes": (other_axes, "ValueError: the mesh has data; 4 ranks: take data, pipeline, tensor"),
    "meshes": (another_mesh_on_one_rank, "ValueError: the ranks disagree about mesh: rank 0 says"),
    "heads": (
        lambda: build((1, 1, 4)),
        "ValueError: blocks.0: heads over 4 ranks: 2 is not a multiple of 4",
    ),
    "a rank's model": (
        lambda: build((2, 1, 2), lambda: md.zoo.Transformer(16 + (dist.get_rank() == 3))),
        "ValueError: the ranks have different models.",
    ),
    "a replica's micro-batches": (
        lambda: build((2, 2, 1), microbatches=2 if dist.get_rank() < 2 else 4),
        "ValueError: the ranks disagree about microbatches: rank 0 says 2, rank 2 says 4",
    ),
}


def test_what_cannot_be_trained_on_a_mesh_is_refused_on_every_rank(pools):
    for what, (function, said) in WRONG_MODELS.items():
        told = pools(4)(raised, function)
        assert all(said in each for each in told), (what, told)


@pytest.mark.parametrize(("sizes", "length"), [((2, 1, 1), 1), ((1, 1, 2), 7)])
def test_rows_that_cannot_be_cut_are_refused_on_every_rank(pools, sizes, length):
    def run():
        whole = mesh(*sizes, context=2)
        model = MixedParallel(transformer(length=7), whole, 2, sequence_parallel=True)
        return raised(model.train_step, *batch(0, length=length), model.cross_entropy)

    told = pools(4)(run)
    assert told == [f"ValueError: {length} tokens cannot be cut over 2 x {sizes[2]} ranks"] * 4
