"""A model that is split by features trains as one process does. Held against the dense
layers in one process, and against torch's own parallelize_module.

All ranks see the same batch, so a gradient that is summed once too often, or not at all, shows as
a wrong value; that replicas stay equal proves nothing here.
"""

import copy
import io
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_plan import raised
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import minidist as md
from minidist import tensor_parallel as tp
from minidist.common.norm import clip_grad_norm_
from minidist.common.single import ALL_GATHER, REDUCE_SCATTER
from minidist.tensor_parallel.model import counted_elsewhere

ALLOWED = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}
BACKENDS = ["gloo", "shm"]


@pytest.fixture(scope="module")
def pair():
    """Two ranks of a backend, the same ones at every call."""
    with md.ranks(2, backend="gloo") as gloo, md.ranks(2, backend="shm") as shm:
        yield {"gloo": gloo, "shm": shm}


def here():
    return dist.get_rank(), dist.get_world_size()


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def part(x, dim=-1):
    """This rank's part."""
    rank, size = here()
    return x.chunk(size, dim)[rank]


def norm_of(model, kind=2.0):
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()], kind)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def apart(named):
    """What differs in {name: (ours, wanted)}, by more than its dtype allows."""
    found = []
    for name, (a, b) in named.items():
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            found.append(f"{name}: {a} and {b}")
        elif not md.parity.relative_difference(a, b) <= ALLOWED[b.dtype]:
            found.append(f"{name} differs by {md.parity.relative_difference(a, b):.1e}")
    return found


# ---- the operators ----------------------------------------------------------------------------

# Each as one process sees it, on a list of what the ranks hold. Where the input or the output is
# replicated, the list has one entry.
WORLDS = {
    "copy_to_group": (lambda xs, dim, p: xs * p, "one", "each"),
    "reduce_from_group": (lambda xs, dim, p: [sum(xs)], "each", "one"),
    "scatter_to_group": (lambda xs, dim, p: list(xs[0].chunk(p, dim)), "one", "each"),
    "gather_from_group": (lambda xs, dim, p: [torch.cat(xs, dim)], "each", "one"),
    "gather_from_sequence": (lambda xs, dim, p: [torch.cat(xs, dim)] * p, "each", "each"),
    "reduce_scatter_to_sequence": (lambda xs, dim, p: list(sum(xs).chunk(p, dim)), "each", "each"),
}


def bend(y, seed):
    """A number that depends on every element, not linearly and on each rank in another way."""
    return (y.sin() * random(*y.shape, seed=50 + seed)).sum() + (y**3).mean()


def operator_and_world(name, dim):
    """Values, gradients, and gradients of gradients, of an operator and of its world."""
    rank, size = here()
    world, come, go = WORLDS[name]
    shape = (2 * size, 3 * size, 4 * size)
    xs = [random(*shape, seed=i).requires_grad_() for i in range(size if come == "each" else 1)]
    outs = world(xs, dim, size)
    wanted = torch.autograd.grad(sum(bend(y, i) for i, y in enumerate(outs)), xs, create_graph=True)
    twice = torch.autograd.grad(sum(bend(g, i) for i, g in enumerate(wanted)), xs)

    mine = rank if come == "each" else 0
    x = xs[mine].detach().clone().requires_grad_()
    function = getattr(tp, name)
    y = function(x) if name in ("copy_to_group", "reduce_from_group") else function(x, dim)
    theirs = rank if go == "each" else 0
    (grad,) = torch.autograd.grad(bend(y, theirs), x, create_graph=True)
    (second,) = torch.autograd.grad(bend(grad, mine), x)
    return apart(
        {
            "value": (y, outs[theirs]),
            "gradient": (grad, wanted[mine]),
            "second": (second, twice[mine]),
        }
    ) + ([] if torch.equal(x, xs[mine]) else ["the input has changed"])


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", WORLDS)
def test_the_backward_of_an_operator_is_its_transpose(pools, name, size):
    for dim in (-1, 0, 1):
        assert pools(size)(operator_and_world, name, dim) == [[]] * size


def any_layout():
    """Values and gradients that are transposed, or one number in many places."""
    x = random(4, 6).requires_grad_()
    weights = random(6, 4, seed=1)
    tp.copy_to_group(x).sum().backward()
    tp.gather_from_sequence(x, 0).sum().backward()
    tp.scatter_to_group(x.T, 0).sum().backward()
    (tp.copy_to_group(x).T * weights).sum().backward()
    return apart(
        {
            "gradient": (x.grad, 2 + 2 + 1 + 2 * weights.T),
            "gathered": (tp.gather_from_group(x.T, 0), torch.cat([x.T, x.T])),
            "reduced": (tp.reduce_from_group(x.T), 2 * x.T),
            "scattered": (tp.reduce_scatter_to_sequence(x.T, 1), 2 * part(x.T)),
        }
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_of_any_layout(pair, backend):
    assert pair[backend](any_layout) == [[]] * 2


def test_what_cannot_be_cut_is_refused(pools):
    def refuse():
        x = torch.ones(4, 7)
        return [
            raised(tp.scatter_to_group, x),
            raised(tp.reduce_scatter_to_sequence, x, 1),
            raised(md.RowParallelLinear(6, 5, sequence_parallel=True), torch.ones(7, 2)),
        ]

    for told in pools(3)(refuse):
        assert all(each.startswith("ValueError") and "3" in each and "7" in each for each in told)


# ---- linear layers ----------------------------------------------------------------------------


def pair_of_layers(dtype, sequence_parallel):
    """Column and row against two dense layers: output, and the gradient of everything."""
    torch.manual_seed(3)
    up, down = nn.Linear(6, 8, dtype=dtype), nn.Linear(8, 5, dtype=dtype)
    options = dict(sequence_parallel=sequence_parallel)
    column = md.ColumnParallelLinear.from_dense(up, **options)
    row = md.RowParallelLinear.from_dense(down, **options)

    x = random(3, 4, 6, dtype=dtype).requires_grad_()
    y = down(up(x).relu())
    weights = random(3, 4, 5, seed=1, dtype=dtype)
    (y * weights).sum().backward()

    shared = (lambda t: part(t, 1)) if sequence_parallel else lambda t: t
    ours = shared(x.detach()).clone().requires_grad_()
    for _ in range(2):  # gradients add up
        out = row(column(ours).relu())
        (out * shared(weights)).sum().backward()
    return apart(
        {
            "output": (out, shared(y)),
            "x": (ours.grad / 2, shared(x.grad)),
            "column weight": (column.weight.grad / 2, part(up.weight.grad, 0)),
            "column bias": (column.bias.grad / 2, part(up.bias.grad, 0)),
            "row weight": (row.weight.grad / 2, part(down.weight.grad, 1)),
            "row bias": (row.bias.grad / 2, down.bias.grad),
        }
    )


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
def test_a_column_and_a_row_layer_are_two_dense_ones(pair, backend, dtype, sequence_parallel):
    assert pair[backend](pair_of_layers, dtype, sequence_parallel) == [[]] * 2


def test_on_four_ranks(pools):
    for sequence_parallel in (False, True):
        assert pools(4)(pair_of_layers, torch.float64, sequence_parallel) == [[]] * 4


def test_alone_each_is_a_linear_layer(pools):
    def alone():
        found = []
        for cls, option in (
            (md.ColumnParallelLinear, dict(gather_output=True)),
            (md.RowParallelLinear, {}),
        ):
            dense = nn.Linear(6, 9, dtype=torch.float64)
            dense.load_state_dict({k: random(*v.shape) for k, v in dense.state_dict().items()})
            layer = cls.from_dense(dense, **option)
            x = random(6, seed=4).requires_grad_()  # no batch
            y = random(6, seed=4).requires_grad_()
            into = y if option else tp.scatter_to_group(y)
            out = layer(into)
            bend(dense(x), 0).backward()
            bend(out, 0).backward()
            found += apart({"output": (out, dense(x)), "x": (y.grad, x.grad)})
            for parameter in layer.parameters():
                parameter.data = parameter.grad
            for name, parameter in layer.to_dense().named_parameters():
                found += apart({name: (parameter, dense.get_parameter(name).grad)})
        return found

    assert pools(3)(alone) == [[]] * 3


def test_a_seed_makes_the_shards_of_the_dense_layer(pools):
    def make():
        found = []
        for parallel, dense in (
            (
                lambda: md.ColumnParallelLinear(6, 9, dtype=torch.float64),
                lambda: nn.Linear(6, 9, dtype=torch.float64),
            ),
            (lambda: md.RowParallelLinear(6, 9, bias=False), lambda: nn.Linear(6, 9, False)),
            (lambda: md.VocabParallelEmbedding(10, 3), lambda: nn.Embedding(10, 3)),
            (lambda: tp.VocabParallelLinear(3, 10), lambda: nn.Linear(3, 10)),
            (lambda: tp.ParallelBlock(12, 6), lambda: md.zoo.Block(12, 6)),
        ):
            torch.manual_seed(5)
            wanted, after = dense(), torch.rand(3)
            torch.manual_seed(5)
            ours = parallel()
            found += [f"{ours}: the generator"] * (not torch.equal(torch.rand(3), after))
            orders = [[name for name, _ in each.named_parameters()] for each in (ours, wanted)]
            found += [f"{orders[0]}: the order"] * (orders[0] != orders[1])
            ours = tp.full_state_dict(ours)
            found += [f"{ours.keys()}"] * (ours.keys() != wanted.state_dict().keys())
            for name, tensor in wanted.state_dict().items():
                found += [name] * (not torch.equal(tensor, ours[name]))
        rank, _ = here()
        torch.manual_seed(5)
        row = md.RowParallelLinear(6, 9)
        torch.manual_seed(5)
        found += ["the part"] * (not torch.equal(row.weight, part(nn.Linear(6, 9).weight, 1)))
        return found

    assert pools(3)(make) == [[]] * 3


def test_a_layer_keeps_what_the_dense_one_was(pools):
    def keep():
        dense = nn.Linear(4, 4, dtype=torch.float64)
        dense.weight.requires_grad_(False)
        dense.bias.decay = 0.1
        layer = md.ColumnParallelLinear.from_dense(dense)
        assert layer.bias.decay == 0.1
        layer(random(2, 4).requires_grad_()).sum().backward()
        again = copy.deepcopy(layer).to_dense()
        row = md.RowParallelLinear.from_dense(dense)
        return (
            dense.weight.data_ptr() != layer.weight.data_ptr()
            and dense.bias.data_ptr() != row.bias.data_ptr(),
            [(p.requires_grad, p.dtype) for p in again.parameters()],
            layer.weight.grad,
            sorted(layer.state_dict()),
            torch.equal(again.weight, dense.weight),
        )

    def equal():
        torch.manual_seed(0)
        return keep()

    kept = (True, [(False, torch.float64), (True, torch.float64)], None, ["bias", "weight"], True)
    assert pools(2)(equal) == [kept] * 2


def test_a_parameter_with_a_hook_is_not_split(pools):
    def run():
        dense = nn.Linear(4, 4)
        dense.bias.register_post_accumulate_grad_hook(print)
        try:
            md.ColumnParallelLinear.from_dense(dense)
        except ValueError as error:
            return str(error)

    said = "its bias has a hook, which its shard would not have: register it after the split"
    assert pools(2)(run) == [said] * 2


def test_an_input_that_needs_no_gradient_costs_no_message(pools):
    def count():
        layer = md.ColumnParallelLinear(4, 4)
        with md.measure.TrafficCounter() as traffic:
            layer(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            layer(torch.ones(2, 4))
        return traffic.calls, layer.weight.grad is not None

    assert pools(2)(count) == [({}, True)] * 2


def test_autocast(pools):
    def cast():
        torch.manual_seed(0)
        column, row = md.ColumnParallelLinear(4, 4), md.RowParallelLinear(4, 4)
        x = torch.ones(2, 4, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = column(x)
            y = row(hidden)
        y.sum().backward()
        parameters = [*column.parameters(), *row.parameters()]
        return hidden.dtype, y.dtype, {t.grad.dtype for t in (x, *parameters)}

    assert pools(2)(cast) == [(torch.bfloat16, torch.bfloat16, {torch.float32})] * 2


def test_a_batch_that_does_not_lie_in_order(pools):
    def turn(sequence_parallel):
        dense = nn.Linear(4, 6, dtype=torch.float64)
        dense.load_state_dict({k: random(*v.shape) for k, v in dense.state_dict().items()})
        layer = md.ColumnParallelLinear.from_dense(dense, sequence_parallel=sequence_parallel)
        x = random(4, 3, 4, seed=1).requires_grad_()
        shared = (lambda t: part(t, 1)) if sequence_parallel else lambda t: t
        y = shared(x.detach().transpose(0, 1)).requires_grad_()  # (B, T, C) of (T, B, C)
        weights = random(4, 3, 6, seed=2).transpose(0, 1)
        (dense(x.transpose(0, 1)) * weights).sum().backward()
        (layer(y) * part(weights)).sum().backward()
        return apart(
            {
                "x": (y.grad, shared(x.grad.transpose(0, 1))),
                "weight": (layer.weight.grad, part(dense.weight.grad, 0)),
            }
        )

    for sequence_parallel in (False, True):
        assert pools(2)(turn, sequence_parallel) == [[]] * 2


def subgroup(pairs, sequence_parallel):
    """Two groups of two, each with data of its own: no message may reach the other group."""
    groups = [dist.new_group(ranks) for ranks in pairs]
    rank, _ = here()
    which = next(i for i, ranks in enumerate(pairs) if rank in ranks)
    group = groups[which]
    other = raised(md.ColumnParallelLinear, 4, 6, process_group=groups[1 - which])

    dense = md.zoo.Transformer(9, length=4, width=8, heads=2, seed=which).double()
    model, mesh = copy.deepcopy(dense), DeviceMesh.from_group(group, "cpu")
    tp.parallelize_module(model, mesh, sequence_parallel=sequence_parallel)
    tokens, targets = torch.randint(9, (2, 3, 4), generator=torch.Generator().manual_seed(which))
    wanted = md.parity.cross_entropy(dense(tokens), targets)
    loss = md.vocab_parallel_cross_entropy(model(tokens), targets, group)
    wanted.backward()
    loss.backward()
    found = apart({"loss": (loss, wanted), "norm": (norm_of(model), norm_of(dense))})
    with torch.no_grad():
        for parameter in (*model.parameters(), *dense.parameters()):
            parameter.copy_(parameter.grad)
    tp.check_replicas(model, group)
    full = tp.full_state_dict(model)
    found += apart({name: (full[name], tensor) for name, tensor in dense.state_dict().items()})

    linear, x = copy.deepcopy(dense.blocks[0].out), random(3, 8, seed=which)
    column = md.ColumnParallelLinear.from_dense(linear, group, gather_output=True)
    row = md.RowParallelLinear.from_dense(linear, group)
    y = row(tp.scatter_to_group(x, -1, group))
    found += apart({"column": (column(x), linear(x)), "row": (y, linear(x))})
    torch.manual_seed(which)
    block = tp.ParallelBlock(8, 2, 1, process_group=group, dtype=torch.float64)
    bend(block(random(1, 4, 8)), 0).backward()
    block.qkv.kv_weight.data = block.qkv.kv_weight.grad  # is summed over the group
    found += [raised(tp.check_replicas, block, group)]
    # Not their sum: what comes out of a norm adds up to zero, and so do these.
    return [each for each in found if each], other, block.qkv.kv_weight.norm().item()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_group_that_is_not_the_world(pools, sequence_parallel):
    wanted = "ValueError: ColumnParallelLinear: rank {} is not in the process group it was given"
    told = pools(4)(subgroup, [[0, 2], [1, 3]], sequence_parallel)
    assert [each[:2] for each in told] == [([], wanted.format(rank)) for rank in range(4)]
    a, b, c, d = (each[2] for each in told)
    assert a == c and b == d and a != b


# ---- vocabulary -------------------------------------------------------------------------------


def embedding(vocabulary, sequence_parallel):
    dense = nn.Embedding(vocabulary, 6, dtype=torch.float64)
    dense.load_state_dict({"weight": random(vocabulary, 6)})
    ours = md.VocabParallelEmbedding.from_dense(dense, sequence_parallel=sequence_parallel)
    tokens = torch.arange(3 * 12).view(3, 12) % vocabulary
    shared = (lambda t: part(t, 1)) if sequence_parallel else lambda t: t
    weights = random(3, 12, 6, seed=1)
    x, y = dense(tokens), ours(tokens)
    (x * weights).sum().backward()
    (y * shared(weights)).sum().backward()
    rank, size = here()
    index = torch.arange(vocabulary).chunk(size)[rank]  # as DTensor has it
    return apart(
        {
            "output": (y, shared(x)),
            "gradient": (ours.weight.grad, dense.weight.grad[index]),
            "dense": (ours.to_dense().weight, dense.weight),
        }
    )


@pytest.mark.parametrize("size", [2, 3, 4])
def test_an_embedding_is_split_by_vocabulary(pools, size):
    for vocabulary in (12, 13, 14, size):
        for sequence_parallel in (False, True):
            assert pools(size)(embedding, vocabulary, sequence_parallel) == [[]] * size


def loss(classes, dtype, scale, target, **options):
    """Ours against F.cross_entropy: value and gradient."""
    rank, size = here()
    logits = (random(2, 5, classes, dtype=dtype) * scale).requires_grad_()
    targets = torch.arange(10).view(2, 5) * 3 % classes
    targets[0, 1:3] = target
    own = logits.detach().tensor_split(size, -1)[rank].clone().requires_grad_()
    ours = md.vocab_parallel_cross_entropy(own, targets, **options)
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)
    wanted = wanted.view(ours.shape)
    weights = random(*ours.shape, seed=3, dtype=dtype)
    (ours * weights).sum().backward()
    (wanted * weights).sum().backward()
    gradient = logits.grad.tensor_split(size, -1)[rank]
    return apart({"loss": (ours, wanted), "gradient": (own.grad, gradient)})


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_loss_is_that_of_all_logits(pools, reduction, label_smoothing):
    for size, classes in ((2, 8), (3, 8), (4, 7), (4, 4)):
        for target, scale in ((2, 1), (-100, 1), (3, 1000)):
            options = dict(reduction=reduction, label_smoothing=label_smoothing)
            told = pools(size)(loss, classes, torch.float64, scale, target, **options)
            assert told == [[]] * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_loss_of_large_logits_in_every_dtype(pair, backend, dtype):
    for scale in (1, 1e4):
        assert pair[backend](loss, 8, dtype, scale, -1, ignore_index=-1) == [[]] * 2


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_loss_under_autocast(pools, reduction):
    def run():
        with torch.autocast("cpu", torch.bfloat16):
            return loss(8, torch.bfloat16, 1, -100, reduction=reduction)

    assert pools(2)(run) == [[]] * 2


def test_the_loss_at_its_edges(pools):
    def edges():
        rank, size = here()
        x = random(3, 2, seed=rank).requires_grad_()
        targets = torch.tensor([0, 3, 1])
        for smoothing in (0.0, 0.1):
            none = md.vocab_parallel_cross_entropy(
                x, torch.full((3,), -100), label_smoothing=smoothing
            )
            none.backward()
            assert x.grad.eq(0).all()  # as torch has it, and the loss is nan
        once = md.vocab_parallel_cross_entropy(x, targets)
        once.backward(retain_graph=True)
        nothing = md.vocab_parallel_cross_entropy(x[:0], targets[:0], reduction="sum")
        assert nothing == 0
        single = md.vocab_parallel_cross_entropy(x[0], targets[0])  # no batch
        assert torch.equal(single, md.vocab_parallel_cross_entropy(x[:1], targets[:1]))
        return [
            math.isnan(none),  # as torch has it
            raised(once.backward),
            raised(md.vocab_parallel_cross_entropy, x, torch.tensor([0, 4, 1])),
            raised(md.vocab_parallel_cross_entropy, x, torch.tensor([0, -1, 1])),
            raised(md.vocab_parallel_cross_entropy, x, targets[:2]),
            raised(md.vocab_parallel_cross_entropy, x, targets, reduction="max"),
        ]

    for nan, twice, high, low, shape, reduction in pools(2)(edges):
        assert nan
        assert twice.startswith("RuntimeError") and "inplace" in twice
        assert high == low == "IndexError: a target is not among the 4 classes"
        assert shape == "ValueError: logits of shape (3, 2) need targets of shape (3,), not (2,)"
        assert reduction.startswith("ValueError") and "'max'" in reduction


def test_the_loss_of_ranks_with_other_targets_is_refused(pools):
    """As with the group of another axis of a mesh: there each rank has rows of its own."""

    def run():
        axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        group, own = axes.get_group("data"), axes.get_local_rank("data")
        pairs = ([0, 3, 1], [3, 0, 1]), ([3, 0, 0], [0, 1, 0]), ([0, 1, 1, 0], [1, 0, 0, 1])
        return [
            raised(
                md.vocab_parallel_cross_entropy,
                torch.randn(len(pair[own]), 2),
                torch.tensor(pair[own]),
                group,
            )
            for pair in pairs
        ]

    said = "ValueError: the ranks of this group have different targets"
    assert all(str(each).startswith(said) for told in pools(4)(run) for each in told)


def test_the_loss_never_gathers_the_logits(pools):
    def count(n, classes, dtype=torch.float64, **options):
        x = torch.zeros(n, classes, dtype=dtype, requires_grad=True)
        with md.measure.TrafficCounter() as traffic:
            md.vocab_parallel_cross_entropy(x, torch.zeros(n).long(), **options).backward()
        return traffic.calls

    for n, classes in ((10, 100), (10, 1000), (50, 10)):
        for told in pools(4)(count, n, classes):
            assert told == {"all_reduce": (2, 8 * (n + 4 + 2) + 8 * 2 * n)}
        for told in pools(4)(count, n, classes, label_smoothing=0.1):
            assert told == {"all_reduce": (2, 8 * (n + 4 + 2) + 8 * 3 * n)}
        for told in pools(4)(count, n, classes, torch.bfloat16):  # in float32
            assert told == {"all_reduce": (2, 4 * (n + 4 + 2) + 4 * 2 * n)}


def test_the_loss_makes_its_gradient_in_place(pools):
    def measure(n=64, classes=500):
        head = nn.Linear(2, classes)
        with md.measure.MemoryTracker(head) as memory:
            logits = head(torch.ones(n, 2))
            md.vocab_parallel_cross_entropy(logits, torch.zeros(n).long()).backward()
            del logits  # not before
        return memory.peak / (4 * n * classes)

    # The logits and the probabilities, each (N, V_r); F.cross_entropy has a third for the gradient.
    assert all(2 <= peak < 2.3 for peak in pools(2)(measure))


# ---- a block, and a whole model ---------------------------------------------------------------


class Dense(nn.Module):
    """Grouped-query attention in one process."""

    def __init__(self, width, heads, kv_heads, bias):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.size, bias=bias)

    def forward(self, x):
        sizes = [count * self.size for count in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (
            each.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for each in self.qkv(x).split(sizes, -1)
        )
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def grouped_query(kv_heads, sequence_parallel, bias=False):
    heads, width = 8, 16
    rank, size = here()
    torch.manual_seed(0)
    dense = Dense(width, heads, kv_heads, bias).double()
    block = tp.ParallelBlock(
        width, heads, kv_heads, sequence_parallel=sequence_parallel, dtype=torch.float64
    )
    block.qkv = tp.QKVParallelLinear.from_dense(
        dense.qkv, heads=heads, kv_heads=kv_heads, sequence_parallel=sequence_parallel
    )
    block.out = nn.Identity()
    x = random(2, 4, width).requires_grad_()
    weights = random(2, 4, width, seed=1)
    y = dense(x)
    (y * weights).sum().backward()
    shared = (lambda t: part(t, 1)) if sequence_parallel else lambda t: t
    ours = shared(x.detach()).clone().requires_grad_()
    out = block.attention(ours)
    (out * part(weights)).sum().backward()
    found = apart({"output": (out, part(y)), "x": (ours.grad, shared(x.grad))})
    ranks = dict(groups=[None], device=x.device, elsewhere=counted_elsewhere(block.qkv, None))
    norm = clip_grad_norm_(block.qkv.parameters(), float("inf"), **ranks)
    found += apart({"norm": (norm, norm_of(dense))})
    tp.check_replicas(block)
    again = block.qkv.to_dense()
    for name, parameter in again.named_parameters():
        found += apart({name: (parameter, dense.qkv.get_parameter(name))})
    for parameter in block.qkv.parameters():
        parameter.data = parameter.grad
    for name, parameter in block.qkv.to_dense().named_parameters():
        found += apart({f"{name} gradient": (parameter, dense.qkv.get_parameter(name).grad)})
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_attention_with_fewer_key_value_heads(pools, kv_heads, sequence_parallel):
    """On 4 ranks, those of 1 and 2 key-value heads are replicated."""
    for size in (2, 4):
        for bias in (False, True):
            told = pools(size)(grouped_query, kv_heads, sequence_parallel, bias)
            assert told == [[]] * size


def train(sequence_parallel, dtype, tied=True, vocabulary=250, heads=4, steps=4):
    """Adam with clipping, beside one process: the loss, the norm, and all weights at each step."""
    dense = md.zoo.Transformer(vocabulary, length=12, width=24, heads=heads).to(dtype)
    if not tied:
        dense.head.weight = nn.Parameter(dense.head.weight.detach() * 2)
    model = copy.deepcopy(dense)
    tp.parallelize_module(model, sequence_parallel=sequence_parallel)
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    alone = torch.optim.Adam(dense.parameters(), lr=1e-3)
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        tokens = torch.randint(vocabulary, (2, 3, 12), generator=draw)
        inputs, targets = tokens
        optimizer.zero_grad()
        alone.zero_grad()
        ours = md.vocab_parallel_cross_entropy(model(inputs), targets)
        wanted = md.parity.cross_entropy(dense(inputs), targets)
        ours.backward()
        wanted.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3).full_tensor()
        expected = nn.utils.clip_grad_norm_(dense.parameters(), 0.3)
        assert expected > 0.6  # it does clip
        optimizer.step()
        alone.step()
        tp.check_replicas(model)
        state, full = dense.state_dict(), tp.full_state_dict(model)
        found = apart({"loss": (ours, wanted), "norm": (norm, expected)})
        found += apart({name: (full.get(name), tensor) for name, tensor in state.items()})
        found += ["names"] * (full.keys() != state.keys())
        found += [f"{k} stays" for k, v in before.items() if torch.equal(v, full[k])]
        if found:
            return f"step {step}: {found}"
    return None


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("size", "heads"), [(2, 4), (3, 3), (4, 4)])
def test_a_transformer_trains_as_in_one_process(pools, size, heads, sequence_parallel):
    told = pools(size)(train, sequence_parallel, torch.float64, heads=heads)
    assert told == [None] * size


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_transformer_on_shared_memory_with_a_head_of_its_own(pair, sequence_parallel):
    told = pair["shm"](train, sequence_parallel, torch.float64, tied=False, vocabulary=251)
    assert told == [None] * 2


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_dense_models_weights_are_loaded_in_place(pools, sequence_parallel):
    def load():
        dense = md.zoo.Transformer(250, length=12, width=24, heads=4, seed=1)
        model = md.zoo.Transformer(250, length=12, width=24, heads=4)
        tp.parallelize_module(model, sequence_parallel=sequence_parallel)
        before = list(model.parameters())
        tp.load_full_state_dict(model, dense.state_dict())
        found = [] if model.head.weight is model.tokens.weight else ["tie"]
        found += ["other"] * any(
            a is not b for a, b in zip(before, model.parameters(), strict=True)
        )
        full = tp.full_state_dict(model)
        found += [name for name, t in dense.state_dict().items() if not torch.equal(t, full[name])]
        block = tp.ParallelBlock(16, 8, 1)  # on 2 ranks, its key-value head is replicated
        wanted = tp.full_state_dict(tp.ParallelBlock(16, 8, 1))
        tp.load_full_state_dict(block, wanted)
        full = tp.full_state_dict(block)
        found += [name for name, t in wanted.items() if not torch.equal(t, full[name])]
        state = dense.state_dict()
        less = {name: t for name, t in state.items() if name != "blocks.0.qkv.weight"}
        for wrong in (state | {"more": torch.ones(1)}, less):
            try:
                tp.load_full_state_dict(model, wrong)
            except RuntimeError as error:
                found += ["words"] * ("key(s) in state_dict" not in str(error))
            else:
                found += ["loaded"]
        return found

    assert pools(2)(load) == [[]] * 2


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_model_of_a_mesh_is_copied_and_averaged(pools, sequence_parallel):
    """Two models, each shared by two of four ranks: a copy is shared by the same two."""

    def run():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        torch.manual_seed(mesh.get_local_rank("data"))
        dense = md.zoo.Transformer(8, length=6, width=8, heads=2, layers=1).double()
        model, options = copy.deepcopy(dense), dict(sequence_parallel=sequence_parallel)
        tp.parallelize_module(model, mesh["tensor"], **options)
        mean, averaged = (torch.optim.swa_utils.AveragedModel(each) for each in (model, dense))
        tokens, found = torch.arange(12).view(2, 6) % 8, {}
        for _ in range(3):
            for each, loss in ((model, md.vocab_parallel_cross_entropy), (dense, F.cross_entropy)):
                group = [mesh.get_group("tensor")] if each is model else []
                logits = each(tokens).flatten(0, 1)
                loss(logits, tokens.flatten(), *group).backward()
                torch.optim.SGD(each.parameters(), 0.1).step()
                each.zero_grad()
            mean.update_parameters(model)
            averaged.update_parameters(dense)
        wanted = averaged.module.state_dict()
        full = tp.full_state_dict(mean.module)
        found = apart({name: (full[name], value) for name, value in wanted.items()})
        found += ["moved"] * torch.equal(full["head.weight"], dense.head.weight)
        return found, raised(torch.save, model, io.BytesIO())

    for found, refused in pools(4)(run):
        assert found == []
        assert refused.startswith("TypeError: a VocabParallelEmbedding of a mesh or a group cannot")
        assert refused.endswith("Save the full_state_dict of the model")


def test_a_transformer_in_float32(pools):
    """Adam divides by the root of its second moment: in float32 a small gradient, and with it its
    rounding, becomes a step of the size lr. After one step only lr itself bounds that."""

    def forward_and_backward():
        dense = md.zoo.Transformer(250, length=12, width=24, heads=4)
        model = tp.parallelize_module(copy.deepcopy(dense))
        inputs, targets = torch.randint(250, (2, 3, 12), generator=torch.Generator())
        ours = md.vocab_parallel_cross_entropy(model(inputs), targets)
        wanted = md.parity.cross_entropy(dense(inputs), targets)
        ours.backward()
        wanted.backward()
        return apart({"loss": (ours, wanted), "norm": (norm_of(model), norm_of(dense))})

    assert pools(2)(forward_and_backward) == [[]] * 2


def test_the_norm_of_every_kind_and_of_layers_made_before(pools):
    def norms():
        torch.manual_seed(0)
        dense = md.zoo.Block(8, 4).double()
        block = tp.ParallelBlock.from_dense(dense.eval())
        both = {p.data_ptr() for p in dense.parameters()} & {
            p.data_ptr() for p in block.parameters()
        }
        assert not both and not block.training
        tp.parallelize_module(block, None, {})
        x = random(2, 3, 8)
        bend(dense(x), 0).backward()
        bend(block(x), 0).backward()
        found = {}
        for kind in (1.0, 2.0, 3.0, math.inf):
            for place in ("", "mlp.0"):  # where the largest is replicated, and where it is not
                both = block.get_submodule(place), dense.get_submodule(place)
                found[kind, place] = norm_of(both[0], kind), norm_of(both[1], kind)
        return apart(found)

    assert pools(4)(norms) == [[]] * 4


def test_torch_splits_a_block_in_the_same_way(pools):
    """Against parallelize_module: the MLP, the output projection, embedding, head and loss."""

    def against_torch():
        rank, size = here()
        torch.manual_seed(0)
        dense = nn.Sequential(
            nn.Embedding(8, 6),
            nn.Linear(6, 12),
            nn.GELU(),
            nn.Linear(12, 6),
            nn.LayerNorm(6),
            nn.Linear(6, 8, bias=False),
        ).double()
        theirs = parallelize_module(
            copy.deepcopy(dense),
            init_device_mesh("cpu", (size,)),
            {
                "0": RowwiseParallel(input_layouts=Replicate()),
                "1": ColwiseParallel(),
                "3": RowwiseParallel(),
                "5": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
            },
        )
        ours = nn.Sequential(
            md.VocabParallelEmbedding.from_dense(dense[0]),
            md.ColumnParallelLinear.from_dense(dense[1]),
            nn.GELU(),
            md.RowParallelLinear.from_dense(dense[3]),
            copy.deepcopy(dense[4]),
            tp.VocabParallelLinear.from_dense(dense[5]),
        )
        tokens, targets = torch.arange(10) % 8, torch.arange(10) * 3 % 8
        with loss_parallel():
            wanted = F.cross_entropy(theirs(tokens), targets)
            wanted.backward()
        loss = md.vocab_parallel_cross_entropy(ours(tokens), targets)
        loss.backward()
        found = apart({"loss": (loss, wanted.detach().full_tensor())})
        for parameter in ours.parameters():
            parameter.data = parameter.grad
        for name, tensor in tp.full_state_dict(ours).items():
            grad = theirs.get_parameter(name).grad
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            found += apart({name: (tensor, whole)})
        return found

    assert pools(2)(against_torch) == [[]] * 2


# ---- what it costs ----------------------------------------------------------------------------


def traffic_of_a_block(sequence_parallel, B=2, T=8, C=16):
    block = tp.ParallelBlock(C, 4, sequence_parallel=sequence_parallel)
    x = torch.ones(B, T // here()[1] if sequence_parallel else T, C, requires_grad=True)
    with md.measure.TrafficCounter() as forward:
        y = block(x)
    with md.measure.TrafficCounter() as backward:
        y.sum().backward()
    return forward.calls, backward.calls


@pytest.mark.parametrize("size", [2, 4])
def test_a_layer_has_four_all_reduces(pools, size):
    nbytes = 2 * 8 * 16 * 4
    for told in pools(size)(traffic_of_a_block, False):
        assert told == ({"all_reduce": (2, 2 * nbytes)},) * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequence_parallel_moves_the_same_bytes(pair, backend):
    """An all_reduce is a reduce_scatter and an all_gather. In backward the inputs of the two column
    layers are gathered once more, and the weights that saw a part of the tokens are all-reduced:
    those of two norms, of C each and with a bias, and two biases."""
    nbytes = 2 * 8 * 16 * 4
    for forward, backward in pair[backend](traffic_of_a_block, True):
        assert forward == {"all_gather": (2, 2 * nbytes), "reduce_scatter": (2, 2 * nbytes)}
        assert backward == {
            "all_gather": (2 + 2, 4 * nbytes),
            "reduce_scatter": (2, 2 * nbytes),
            "all_reduce": (6, 6 * 16 * 4),
        }


def test_activations_are_as_the_paper_says(pools):
    """Korthikanti et al., Table 2, in elements instead of bytes of half precision, and without
    dropout and the matrix of attention, which torch does not keep: 4 + 12/t times BTC; all of it
    over t with sequence parallel. Of the 4, the block's input belongs to the block before."""

    def activations(sequence_parallel, B=2, T=8, C=32, heads=4):
        block = tp.ParallelBlock(C, heads, sequence_parallel=sequence_parallel)
        t = here()[1]
        x = torch.ones(B, T // t if sequence_parallel else T, C, requires_grad=True)
        measured = []
        for _ in range(5):  # the thread of a collective may give back its tensors late
            with md.measure.MemoryTracker(block) as memory:
                y = block(x)
            # What was gathered is kept as a part, which is what was handed to the collective.
            measured += [memory.live["activations"] + memory.live["communication buffers"]]
            del y
        share = t if sequence_parallel else 1
        large = 3 * B * T * C / share + 12 * B * T * C / t
        small = 2 * 2 * B * T / share + B * heads * T / t  # mean and deviation; log-sum-exp
        return min(measured), 4 * (large + small)

    for size in (1, 2, 4):
        for sequence_parallel in (False, True):
            for measured, formula in pools(size)(activations, sequence_parallel):
                assert measured == formula


def order_of_backward(sequence_parallel):
    """The products of matrices, and when each collective begins and is waited for."""
    log = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.mm.default:
                log.append("product")
            return function(*args, **(kwargs or {}))

    class Waited:
        def __init__(self, name, work):
            self.name, self.work = name, work

        def wait(self):
            log.append(f"wait {self.name}")
            self.work.wait()

    def watched(function):
        def call(*args, **kwargs):
            log.append(function.__name__)
            return Waited(function.__name__, function(*args, **kwargs))

        return call

    layer = md.ColumnParallelLinear(4, 4, sequence_parallel=sequence_parallel)
    y = layer(torch.ones(3, 4, requires_grad=True))
    names = "all_reduce", ALL_GATHER, REDUCE_SCATTER
    before = [getattr(dist, name) for name in names]
    for name, function in zip(names, before, strict=True):
        setattr(dist, name, watched(function))
    try:
        with Products():
            y.backward(torch.ones_like(y))
    finally:
        for name, function in zip(names, before, strict=True):
            setattr(dist, name, function)
    return log


def test_gradients_travel_while_others_are_computed(pools):
    wanted = ["product", "all_reduce", "product", "wait all_reduce"]
    assert pools(2)(order_of_backward, False) == [wanted] * 2
    wanted = [ALL_GATHER, "product", REDUCE_SCATTER, f"wait {ALL_GATHER}", "product"]
    assert pools(2)(order_of_backward, True) == [[*wanted, f"wait {REDUCE_SCATTER}"]] * 2


# ---- random numbers ---------------------------------------------------------------------------


def test_dropout_differs_where_it_must_and_agrees_where_it_must(pools):
    def draw():
        torch.manual_seed(7)
        ones = torch.ones(64)
        before = F.dropout(ones)
        with tp.fork_rng():
            inside = F.dropout(ones)
            torch.rand(here()[0])  # however much a rank draws
        with tp.fork_rng():
            again = F.dropout(ones)
        return [t.tolist() for t in (before, inside, again, F.dropout(ones))]

    told = pools(3)(draw)
    assert told == pools(3)(draw)  # a run can be repeated
    for place, kinds in enumerate((1, 3, 3, 1)):
        assert len({tuple(each[place]) for each in told}) == kinds
    assert len({tuple(each) for each in told[0]}) == 4  # and each time another one


def dropout_of_a_block(sequence_parallel):
    torch.manual_seed(1)
    block = tp.ParallelBlock(8, 4, dropout=0.5, sequence_parallel=sequence_parallel)
    x = torch.ones(2, 8 // here()[1] if sequence_parallel else 8, 8)
    with torch.no_grad():
        for row in (block.out, block.mlp[2]):  # so that the dropouts after them have all the say
            row.weight.zero_()
            row.bias.fill_(1)
    y = block(x)
    calm = torch.equal(block.eval()(x), x + 2)
    return y.flatten().tolist(), calm, torch.rand(1).item()


def test_dropout_of_a_block(pools):
    (a, b), (c, d) = (pools(2)(dropout_of_a_block, each) for each in (False, True))
    assert a[0] == b[0] and c[0] != d[0]
    assert len({1.0, 3.0, 5.0} & {*a[0]}) == len({*a[0]}) == 3
    assert all(calm for _, calm, _ in (a, b, c, d))
    assert a[2] == b[2] and c[2] == d[2]  # the generators stay in step


def test_dropout_of_attention_differs_between_heads_of_ranks(pools):
    def attention():
        torch.manual_seed(1)
        block = tp.ParallelBlock(8, 2, dropout=0.5)
        block.out = nn.Identity()
        for parameter in block.qkv.parameters():
            parameter.data.fill_(0.1)  # all heads alike
        x = torch.ones(2, 6, 8)
        dropped = block.attention(x).tolist()
        assert torch.equal(block.eval().attention(x), block.attention(x))
        return dropped

    a, b = pools(2)(attention)
    assert a != b


# ---- mistakes ---------------------------------------------------------------------------------


def test_replicas_out_of_step_are_named_on_every_rank(pools):
    def part_ways(change):
        torch.manual_seed(0)
        model = nn.Sequential(tp.ParallelBlock(8, 4), nn.BatchNorm1d(3))
        tp.check_replicas(model)
        with torch.no_grad():
            change(model, here()[0])
        return raised(tp.check_replicas, model)

    def norm(model, rank):
        if rank in (1, 3):
            model[0].norm2.weight[2] += 1e-7

    def bias(model, rank):
        if rank == 0:
            model[0].mlp[2].bias.zero_()

    def buffer(model, rank):
        model[1].running_mean += rank == 2

    def shard(model, rank):
        model[0].mlp[2].weight += rank  # is each rank's own

    names = "RuntimeError: {} should be the same on every rank: rank 0 and rank{} differ"
    assert pools(4)(part_ways, norm) == [names.format("0.norm2.weight", "s 1, 3")] * 4
    assert pools(4)(part_ways, bias) == [names.format("0.mlp.2.bias", "s 1, 2, 3")] * 4
    assert pools(4)(part_ways, buffer) == [names.format("1.running_mean", " 2")] * 4
    assert pools(4)(part_ways, shard) == [None] * 4


def test_sizes_that_cannot_be_split_are_refused(pools):
    def refuse():
        embedding = nn.Embedding(9, 4, padding_idx=0)
        return [
            raised(md.ColumnParallelLinear, 6, 7),
            raised(md.RowParallelLinear, 7, 6),
            raised(md.VocabParallelEmbedding, 2, 4),
            raised(tp.VocabParallelLinear, 4, 2),
            raised(tp.VocabParallelLinear, 4, 10, gather_output=True),
            raised(tp.ParallelBlock, 8, 4),
            raised(tp.ParallelBlock, 24, 6, 4),
            raised(tp.ParallelBlock, 24, 6, 2),
            raised(tp.parallelize_module, md.zoo.Transformer(width=32, heads=2)),
            raised(md.VocabParallelEmbedding.from_dense, embedding),
            raised(md.VocabParallelEmbedding(9, 4), torch.tensor([3, 9])),
            raised(md.VocabParallelEmbedding(9, 4), torch.tensor([-1])),
        ]

    wanted = [
        "ValueError: ColumnParallelLinear: 3 ranks cannot share out_features=7, which is not a "
        "multiple of 3",
        "ValueError: RowParallelLinear: 3 ranks cannot share in_features=7, which is not a "
        "multiple of 3",
        "ValueError: VocabParallelEmbedding: 3 ranks cannot share num_embeddings=2",
        "ValueError: VocabParallelLinear: 3 ranks cannot share out_features=2",
        "ValueError: out_features to gather: 10 is not a multiple of 3",
        "ValueError: heads over 3 ranks: 4 is not a multiple of 3",
        "ValueError: heads over key-value heads: 6 is not a multiple of 4",
        "ValueError: ranks over key-value heads: 3 is not a multiple of 2",
        "ValueError: blocks.0: heads over 3 ranks: 2 is not a multiple of 3",
        "ValueError: a VocabParallelEmbedding has no padding_idx",
        "IndexError: tokens from 3 to 9 are not all in a vocabulary of 9",
        "IndexError: tokens from -1 to -1 are not all in a vocabulary of 9",
    ]
    for told in pools(3)(refuse):
        assert told == wanted


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="ColumnParallelLinear works within a process group"):
        md.ColumnParallelLinear(2, 2)
