"""A model that is split by features trains as one process does. Held against the dense
layers in one process, and against torch's own parallelize_module.

All ranks see the same batch, so a gradient that is summed once too often, or not at all, shows as
a wrong value; that replicas stay equal proves nothing here.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_plan import raised
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import minidist as md
from minidist import tensor_parallel as tp

ALLOWED = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}


@pytest.fixture(scope="module")
def gloo():
    """Two ranks over gloo; all others are over shm."""
    with md.ranks(2, backend="gloo") as pool:
        yield pool


@pytest.fixture(params=["gloo", "shm"])
def pair(request, pools, gloo):
    return gloo if request.param == "gloo" else pools(2)


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


@pytest.mark.parametrize("name", WORLDS)
def test_the_backward_of_an_operator_is_its_transpose(pools, name):
    for size, dim in (2, -1), (3, 0), (3, 1):
        assert pools(size)(operator_and_world, name, dim) == [[]] * size, (size, dim)


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


def test_a_column_and_a_row_layer_are_two_dense_ones(pair):
    for dtype in ALLOWED:
        for sequence_parallel in (False, True):
            case = dtype, sequence_parallel
            assert pair(pair_of_layers, *case) == [[]] * 2, case


def test_both_layers_on_four_ranks(pools):
    for sequence_parallel in (False, True):
        assert pools(4)(pair_of_layers, torch.float64, sequence_parallel) == [[]] * 4


def test_under_autocast_they_compute_as_dense_ones_do(pools):
    def run():
        dense = md.zoo.mlp(6, 8, 5)
        ours = tp.split(copy.deepcopy(dense), None, {"0": "columns", "2": "rows"})
        found = []
        for model in ours, dense:
            x = random(3, 6, dtype=torch.float32).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                y = model(x)
            y.float().square().sum().backward()
            found.append((y.dtype, y.detach(), x.grad))
        (dtype, *ours), (wanted, *theirs) = found
        apart = map(md.parity.relative_difference, ours, theirs)
        return dtype == wanted and max(apart) < ALLOWED[torch.bfloat16]

    assert all(pools(2)(run))


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
        return found

    assert pools(3)(make) == [[]] * 3


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
    given = tokens, tokens % 4  # positions of each row's own
    wanted = md.parity.cross_entropy(dense(*given), targets)
    loss = md.vocab_parallel_cross_entropy(model(*given), targets, group)
    wanted.backward()
    loss.backward()
    found = apart({"loss": (loss, wanted), "norm": (norm_of(model), norm_of(dense))})
    with torch.no_grad():
        for parameter in (*model.parameters(), *dense.parameters()):
            parameter.copy_(parameter.grad)
    tp.check_replicas(model, group)
    full = tp.full_state_dict(model)
    found += apart({name: (full[name], tensor) for name, tensor in dense.state_dict().items()})

    return found, other


def test_a_group_that_is_not_the_world(pools):
    wanted = "ValueError: ColumnParallelLinear: rank {} is not in the process group it was given"
    told = pools(4)(subgroup, [[0, 2], [1, 3]], True)
    assert told == [([], wanted.format(rank)) for rank in range(4)]


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
            "joined": (ours.joined("weight"), dense.weight),
        }
    )


def test_an_embedding_is_split_by_vocabulary(pools):
    for size, vocabulary in (2, 13), (3, 13), (3, 14), (4, 4), (4, 12):
        for sequence_parallel in (False, True):
            case = vocabulary, sequence_parallel
            assert pools(size)(embedding, *case) == [[]] * size, (size, case)


def loss(classes, dtype, scale, target):
    """Ours against F.cross_entropy: value and gradient."""
    rank, size = here()
    logits = (random(2, 5, classes, dtype=dtype) * scale).requires_grad_()
    targets = torch.arange(10).view(2, 5) * 3 % classes
    targets[0, 1:3] = target
    own = logits.detach().tensor_split(size, -1)[rank].clone().requires_grad_()
    ours = md.vocab_parallel_cross_entropy(own, targets)
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    (ours * 3).backward()
    (wanted * 3).backward()
    gradient = logits.grad.tensor_split(size, -1)[rank]
    return apart({"loss": (ours, wanted), "gradient": (own.grad, gradient)})


def test_the_loss_is_that_of_all_logits(pools):
    for size, classes in ((2, 8), (4, 7)):
        for target, scale in ((2, 1), (-100, 1), (3, 1000)):
            told = pools(size)(loss, classes, torch.float64, scale, target)
            assert told == [[]] * size, (size, target)


def test_the_loss_of_large_logits_in_every_dtype(pair):
    for dtype in (torch.float32, torch.bfloat16):
        for scale in (1, 1e4):
            assert pair(loss, 8, dtype, scale, -100) == [[]] * 2, (dtype, scale)


def test_the_loss_at_its_edges(pools):
    def edges():
        x = random(3, 2, seed=here()[0]).requires_grad_()
        targets = torch.tensor([0, 3, 1])
        none = md.vocab_parallel_cross_entropy(x, torch.full((3,), -100))
        none.backward()
        assert none.isnan() and x.grad.eq(0).all()  # as torch has it
        once = md.vocab_parallel_cross_entropy(x, targets)
        once.backward(retain_graph=True)
        return [
            raised(once.backward),
            raised(md.vocab_parallel_cross_entropy, x, torch.tensor([0, 4, 1])),
            raised(md.vocab_parallel_cross_entropy, x, torch.tensor([0, -1, 1])),
            raised(md.vocab_parallel_cross_entropy, x, targets[:2]),
        ]

    for twice, high, low, shape in pools(2)(edges):
        assert twice.startswith("RuntimeError") and "inplace" in twice
        assert high == low == "IndexError: a target is not among the 4 classes"
        assert shape == "ValueError: logits of shape (3, 2) need targets of shape (3,), not (2,)"


def test_the_loss_of_ranks_with_other_targets_is_refused(pools):
    """As with the group of another axis of a mesh: there each rank has rows of its own."""

    def run():
        targets = torch.tensor(([0, 3, 1], [3, 0, 1])[here()[0]])
        return raised(md.vocab_parallel_cross_entropy, torch.randn(3, 2), targets)

    said = "ValueError: the ranks of this group have different targets"
    assert all(str(told).startswith(said) for told in pools(2)(run))


def test_the_loss_never_gathers_the_logits(pools):
    def count(n, classes, dtype=torch.float64):
        x = torch.zeros(n, classes, dtype=dtype, requires_grad=True)
        with md.measure.TrafficCounter() as traffic:
            md.vocab_parallel_cross_entropy(x, torch.zeros(n).long()).backward()
        return traffic.calls

    for n, classes in ((10, 100), (10, 1000), (50, 10)):
        for told in pools(4)(count, n, classes):
            assert told == {"all_reduce": (2, 8 * (n + 4 + 2) + 8 * 2 * n)}
        for told in pools(4)(count, n, classes, torch.bfloat16):  # in float32
            assert told == {"all_reduce": (2, 4 * (n + 4 + 2) + 4 * 2 * n)}


# ---- a block, and a whole model ---------------------------------------------------------------


BLOCK = {  # of a zoo.Block
    "": tp.heads("heads"),
    "norm*": "sequence",
    "qkv": tp.qkv(4),
    "out": "rows",
    "mlp.0": "columns",
    "mlp.2": "rows",
}


def block_of(width, sequence_parallel):
    torch.manual_seed(0)
    block = md.zoo.Block(width, 4)
    return tp.split(block, None, BLOCK, sequence_parallel=sequence_parallel)


def grouped_query(kv_heads, sequence_parallel, heads=8, D=2, C=16):
    """Queries, keys and values of this rank's heads, in one layer: values and gradients."""
    rank, size = here()
    torch.manual_seed(0)
    dense = nn.Linear(C, (heads + 2 * kv_heads) * D, dtype=torch.float64)
    options = dict(heads=heads, kv_heads=kv_heads, sequence_parallel=sequence_parallel)
    layer = tp.QKVParallelLinear.from_dense(dense, **options)
    sizes = [count * D for count in (heads, kv_heads, kv_heads)]
    x = random(2, 4, C).requires_grad_()
    y = torch.cat([part(each) for each in dense(x).split(sizes, -1)], -1)  # whole heads
    others = [random(2, 4, (heads + 2 * kv_heads) * D // size, seed=r) for r in range(size)]
    parts = [
        torch.cat([each.chunk(size, -1)[r] for each in dense(x).split(sizes, -1)], -1)
        for r in range(size)
    ]
    sum((each * weights).sum() for each, weights in zip(parts, others, strict=True)).backward()
    shared = (lambda t: part(t, 1)) if sequence_parallel else lambda t: t
    ours = shared(x.detach()).clone().requires_grad_()
    out = layer(ours)
    (out * others[rank]).sum().backward()
    found = apart({"output": (out, y), "x": (ours.grad, shared(x.grad))})
    for name, parameter in layer.named_parameters():
        found += apart({name: (layer.joined(name), dense.get_parameter(name))})
        parameter.data = parameter.grad
        found += apart({f"{name} grad": (layer.joined(name), dense.get_parameter(name).grad)})
    return found


def test_queries_with_fewer_keys_and_values(pools):
    for size, kv_heads in (2, 2), (2, 8), (4, 4):
        for sequence_parallel in (False, True):
            told = pools(size)(grouped_query, kv_heads, sequence_parallel)
            assert told == [[]] * size, (size, kv_heads, sequence_parallel)


def train(sequence_parallel, dtype, tied=True, vocabulary=250, heads=4, steps=3):
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
def test_a_transformer_trains_as_in_one_process(pools, gloo, sequence_parallel):
    for size in (3, 4):
        told = pools(size)(train, sequence_parallel, torch.float64, heads=size)
        assert told == [None] * size, size
    told = gloo(train, sequence_parallel, torch.float64, tied=False, vocabulary=251)
    assert told == [None] * 2


def test_the_dense_models_weights_are_loaded_in_place(pools):
    def load():
        dense = md.zoo.Transformer(250, length=12, width=24, heads=4, seed=1)
        model = md.zoo.Transformer(250, length=12, width=24, heads=4)
        tp.parallelize_module(model)
        before = list(model.parameters())
        state = dense.state_dict()
        tp.load_full_state_dict(model, state)
        assert model.head.weight is model.tokens.weight
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        full = tp.full_state_dict(model)
        less = {name: t for name, t in state.items() if name != "blocks.0.qkv.weight"}
        for wrong in (state | {"more": torch.ones(1)}, less):
            told = raised(tp.load_full_state_dict, model, wrong)
            assert told.startswith("RuntimeError") and "key(s) in state_dict" in told
        longer = state | {"blocks.0.mlp.0.weight": torch.ones(100, 24)}
        told = raised(tp.load_full_state_dict, model, longer)
        assert told.startswith("RuntimeError: size mismatch for blocks.0.mlp.0.weight: (100, 24)")
        return [name for name, t in state.items() if not torch.equal(t, full[name])]

    assert pools(2)(load) == [[]] * 2


# ---- what it costs ----------------------------------------------------------------------------


def traffic_of_a_block(sequence_parallel, B=2, T=8, C=16):
    block = block_of(C, sequence_parallel)
    x = torch.ones(B, T // here()[1] if sequence_parallel else T, C, requires_grad=True)
    with md.measure.TrafficCounter() as forward:
        y = block(x)
    with md.measure.TrafficCounter() as backward:
        y.sum().backward()
    return forward.calls, backward.calls


def test_a_layer_has_four_all_reduces(pools):
    nbytes = 2 * 8 * 16 * 4
    for size in (2, 4):
        for told in pools(size)(traffic_of_a_block, False):
            assert told == ({"all_reduce": (2, 2 * nbytes)},) * 2, size


def test_sequence_parallel_moves_the_same_bytes(pair):
    """An all_reduce is a reduce_scatter and an all_gather. In backward the inputs of the two column
    layers are gathered once more, and the weights that saw a part of the tokens are all-reduced:
    those of two norms, of C each and with a bias, and two biases."""
    nbytes = 2 * 8 * 16 * 4
    for forward, backward in pair(traffic_of_a_block, True):
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
        block = block_of(C, sequence_parallel)
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
    names = "all_reduce", "all_gather_single", "reduce_scatter_single"
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
    gathers = "all_gather_single", "product", "reduce_scatter_single"
    wanted = [*gathers, "wait all_gather_single", "product"]
    assert pools(2)(order_of_backward, True) == [[*wanted, "wait reduce_scatter_single"]] * 2


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


# ---- mistakes ---------------------------------------------------------------------------------


def test_replicas_out_of_step_are_named_on_every_rank(pools):
    def part_ways(change):
        torch.manual_seed(0)
        model = nn.Sequential(block_of(8, False))
        tp.check_replicas(model)
        with torch.no_grad():
            change(model, here()[0])
        return raised(tp.check_replicas, model)

    def norm(model, rank):
        if rank in (1, 3):
            model[0].norm2.weight[2] += 1e-7

    def shard(model, rank):
        model[0].mlp[2].weight += rank  # is each rank's own

    names = "RuntimeError: {} should be the same on every rank: rank 0 and rank{} differ"
    assert pools(4)(part_ways, norm) == [names.format("0.norm2.weight", "s 1, 3")] * 4
    assert pools(4)(part_ways, shard) == [None] * 4


def test_sizes_that_cannot_be_split_are_refused(pools):
    def refuse():
        return [
            raised(md.ColumnParallelLinear, 6, 7),
            raised(md.RowParallelLinear, 7, 6),
            raised(md.VocabParallelEmbedding, 2, 4),
            raised(tp.VocabParallelLinear, 4, 2),
            raised(tp.QKVParallelLinear.from_dense, nn.Linear(8, 24), heads=4),
            raised(tp.QKVParallelLinear.from_dense, nn.Linear(8, 16), heads=6, kv_heads=1),
            raised(tp.parallelize_module, md.zoo.Transformer(width=32, heads=2)),
            raised(md.VocabParallelEmbedding(9, 4), torch.tensor([3, 9])),
            raised(tp.scatter_to_group, torch.ones(4, 7)),
            raised(md.RowParallelLinear(6, 5, sequence_parallel=True), torch.ones(7, 2)),
        ]

    wanted = [
        "ValueError: ColumnParallelLinear: 3 ranks cannot share out_features=7, which is not a "
        "multiple of 3",
        "ValueError: RowParallelLinear: 3 ranks cannot share in_features=7, which is not a "
        "multiple of 3",
        "ValueError: VocabParallelEmbedding: 3 ranks cannot share num_embeddings=2",
        "ValueError: VocabParallelLinear: 3 ranks cannot share out_features=2",
        "ValueError: heads over 3 ranks: 4 is not a multiple of 3",
        "ValueError: key-value heads over 3 ranks: 1 is not a multiple of 3",
        "ValueError: blocks.0: heads over 3 ranks: 2 is not a multiple of 3",
        "IndexError: tokens from 3 to 9 are not all in a vocabulary of 9",
        "ValueError: ",
        "ValueError: ",
    ]
    for told in pools(3)(refuse):
        for each, words in zip(told, wanted, strict=True):
            assert each.startswith(words), each
        assert all("7" in each and "3" in each for each in told[-2:]), told
