"""Lesson 4: ranks that average their gradients train as one process does, whatever the model and
the loop look like. Held against one process, and against torch's own DistributedDataParallel."""

import contextlib
import copy
import gc
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from programs import Family
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist.common.replicas import broadcast_state
from minidist.distributed_data_parallel import bf16_compress_hook
from minidist.distributed_data_parallel.buckets import assign

OURS = md.DistributedDataParallel
TINY = 1e-4  # MiB: a bucket of some 13 float64 parameters, so that models of a few have several
ALLOWED = {torch.float64: 1e-12, torch.complex128: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}


def here():
    return dist.get_rank(), dist.get_world_size()


def share(rank, step=0, n=5, width=6, dtype=torch.float64):
    """Examples of a rank, other ones on each rank and at each step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(n, width, dtype=dtype, generator=generator)


def net(*sizes, dtype=torch.float64):
    return md.zoo.mlp(*(sizes or (6, 5, 4, 3)), dtype=dtype)


def apart(ours, plain):
    """What differs between two models: parameters, gradients, buffers."""
    found = []
    tensors = zip_longest(ours.state_dict().items(), plain.state_dict().items())
    tensors = [(name, a, b) for (name, a), (_, b) in tensors]
    tensors += [
        (f"{name}.grad", p.grad, plain.get_parameter(name).grad)
        for name, p in ours.named_parameters()
    ]
    for name, a, b in tensors:
        if a is None or b is None:
            if a is not b:
                found.append(f"{name}: {a} and {b}")
        elif a.shape != b.shape or a.dtype != b.dtype:
            found.append(f"{name}: {a.shape} {a.dtype} and {b.shape} {b.dtype}")
        elif not md.parity.relative_difference(a, b) <= ALLOWED.get(a.dtype, 0):
            found.append(f"{name} differs by {md.parity.relative_difference(a, b):.1e}")
    return found


def one_process(plain, way, step, ranks=None):
    """Go `way` for every rank, and take the mean."""
    size = dist.get_world_size()
    for rank in range(size) if ranks is None else ranks:
        way(
            plain,
            rank,
            step,
            lambda loss, **options: (loss / size).backward(**options),
            contextlib.nullcontext,
        )


def compare(make, way, steps=3, keep=False, wrap=OURS, **options):
    """On a rank: train by `wrap` and alone, and return the first difference."""
    rank, _ = here()
    torch.manual_seed(0)
    module = make()
    plain, ddp = copy.deepcopy(module), wrap(module, **options)
    no_sync = getattr(ddp, "no_sync", contextlib.nullcontext)
    for step in range(steps):
        way(ddp, rank, step, lambda loss, **options: loss.backward(**options), no_sync)
        one_process(plain, way, step)
        if found := apart(module, plain):
            return f"step {step}: {found}"
        for p in (*module.parameters(), *plain.parameters()):
            if p.grad is not None:
                p.data -= 0.05 * p.grad
                if not keep:
                    p.grad = None
    return None


def loss_of(output, step=0):
    """A loss that weighs every element differently."""
    weights = torch.arange(1, output.numel() + 1, dtype=output.dtype).view(output.shape) + step
    return (output * weights).sum() / output.numel()


def plainly(model, rank, step, backward, no_sync):
    backward(loss_of(model(share(rank, step)), step))


# ---- the loop ---------------------------------------------------------------------------------


def accumulate(model, rank, step, backward, no_sync):
    with no_sync():
        plainly(model, rank, step + 10, backward, no_sync)
        plainly(model, rank, step + 20, backward, no_sync)
    plainly(model, rank, step, backward, no_sync)


def nested_no_sync(model, rank, step, backward, no_sync):
    with no_sync():
        with contextlib.suppress(ZeroDivisionError), no_sync():
            _ = 1 / 0
        plainly(model, rank, step + 10, backward, no_sync)
    plainly(model, rank, step, backward, no_sync)


def no_sync_is_read_at_the_forward_pass(model, rank, step, backward, no_sync):
    with no_sync():
        output = model(share(rank, step))
    backward(loss_of(output, step))  # not averaged, or it would count twice as much as
    output = model(share(rank, step + 10))
    with no_sync():
        backward(loss_of(output))  # this, which is averaged


def no_sync_ends_at_the_last_forward_pass(model, rank, step, backward, no_sync):
    output = model(share(rank, step))
    with no_sync():
        other = model(share(rank, step + 10))
    backward(loss_of(output, step) + loss_of(other))


def several_backward_passes(model, rank, step, backward, no_sync):
    for i in range(3):
        plainly(model, rank, step + 10 * i, backward, no_sync)


def forward_passes_first(model, rank, step, backward, no_sync):
    outputs = [model(share(rank, step + 10 * i)) for i in range(3)]
    for output in outputs:
        backward(loss_of(output))


def one_backward_pass_for_several(model, rank, step, backward, no_sync):
    outputs = [model(share(rank, step + 10 * i)) for i in range(3)]
    backward(sum(map(loss_of, outputs)))


def retain_graph(model, rank, step, backward, no_sync):
    loss = loss_of(model(share(rank, step)))
    backward(loss, retain_graph=True)
    backward(loss * 3, retain_graph=True)
    backward(loss)


def evaluation_between(model, rank, step, backward, no_sync):
    output = model(share(rank, step))
    with torch.no_grad():
        model(share(rank, step + 10))
        model.eval()(share(rank, step + 10))
    backward(loss_of(output), retain_graph=True)
    with torch.no_grad():
        model(share(rank, step + 10))
    model.train()
    backward(loss_of(output))


def autograd_grad_passes_through(model, rank, step, backward, no_sync):
    x = share(rank, step).requires_grad_()
    loss = loss_of(model(x))
    torch.autograd.grad(loss, x, retain_graph=True)
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    backward(loss)


def gradient_penalty(model, rank, step, backward, no_sync):
    x = share(rank, step).requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(loss_of(output), x, create_graph=True)
    backward(loss_of(output) + slope.pow(2).sum())


def penalty_by_two_backward_passes(model, rank, step, backward, no_sync):
    """create_graph within no_sync asks nothing of the others."""
    with no_sync():
        backward(loss_of(model(share(rank, step))), create_graph=True)
    for p in model.parameters():
        assert p.grad.requires_grad or p.ndim == 1
        p.grad = p.grad.detach()
    plainly(model, rank, step, backward, no_sync)


def gradients_of_the_users(model, rank, step, backward, no_sync):
    """Tensors of its own in .grad, other ones on each rank."""
    with no_sync():
        plainly(model, rank, step + 10, backward, no_sync)
    for i, p in enumerate(model.parameters()):
        p.grad = p.grad.clone() if i % 2 else p.grad
    plainly(model, rank, step, backward, no_sync)


LOOPS = [
    plainly,
    accumulate,
    nested_no_sync,
    no_sync_is_read_at_the_forward_pass,
    no_sync_ends_at_the_last_forward_pass,
    several_backward_passes,
    forward_passes_first,
    one_backward_pass_for_several,
    retain_graph,
    evaluation_between,
    autograd_grad_passes_through,
    gradient_penalty,
    penalty_by_two_backward_passes,
    gradients_of_the_users,
]


def smooth():
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    return model.double()


@pytest.mark.parametrize("find_unused_parameters", [False, True])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_any_loop_gives_the_gradients_of_one_process(pools, loop, find_unused_parameters):
    run = partial(
        compare,
        smooth,
        loop,
        bucket_cap_mb=TINY,
        find_unused_parameters=find_unused_parameters,
    )
    assert pools(3)(run) == [None] * 3


@pytest.mark.parametrize("loop", [plainly, accumulate, several_backward_passes])
def test_gradients_that_are_not_set_to_none_add_up(pools, loop):
    assert pools(2)(compare, smooth, loop, keep=True, bucket_cap_mb=TINY) == [None] * 2


class Boxed(nn.Module):
    """Its losses are in a plain object."""

    def __init__(self):
        super().__init__()
        self.inner = smooth()

    def forward(self, x):
        y = self.inner(x)
        return SimpleNamespace(losses=[loss_of(y), loss_of(y.sin())])


def each_loss_in_a_box(model, rank, step, backward, no_sync):
    for loss in model(share(rank, step)).losses:
        backward(loss, retain_graph=True)


def test_each_of_several_losses_in_an_object_is_averaged(pools):
    assert pools(2)(compare, Boxed, each_loss_in_a_box) == [None] * 2


# ---- the model --------------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters of all layouts: transposed, channels last, with gaps, expanded, 0-dim, empty."""

    def __init__(self):
        super().__init__()

        def p(tensor):
            return nn.Parameter(tensor.double())

        self.transposed = p(torch.randn(3, 6).t())
        self.channels_last = p(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.gaps = p(torch.randn(6, 8)[:, ::2])
        self.scalar = p(torch.tensor(1.5))
        self.empty = p(torch.empty(0, 3))
        self.one = p(torch.randn(1, 1, 1))

    def forward(self, x):
        x = (x @ self.transposed).sum() * self.channels_last.pow(2) * self.scalar + self.one
        return x.sum() + self.gaps.pow(3).sum() * x.sum() + self.empty.sum()


class Mixed(nn.Module):
    """Parameters of four dtypes."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = net(6, 4), net(4, 4, dtype=torch.float32), net(4, 3)
        self.short = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16))
        self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex128))

    def forward(self, x):
        x = self.c(self.b(self.a(x).float()).double()) * self.short
        return (x * self.turn).abs()


@dataclass
class Result:
    """Nothing that torch's pytree knows."""

    logits: torch.Tensor
    name: str = "text"


class Outputs(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.net, self.bias = net(6, 4), nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self.way = way

    def forward(self, x):
        y = self.net(x) + self.bias
        if self.way == "nested":
            return {"a": [(y, None), "text"], "b": 3}
        if self.way == "dataclass":
            return Result(y)
        if self.way == "kept":
            self.kept = y
            return None
        if self.way == "parameter":
            self.kept = self.net(x)
            return self.bias
        if self.way == "input":
            self.kept = y
            return x
        raise AssertionError(self.way)

    def loss(self, output):
        if self.way == "nested":
            return loss_of(output["a"][0][0])
        if self.way == "dataclass":
            return loss_of(output.logits)
        if self.way == "parameter":
            return loss_of(output + self.kept)
        return loss_of(self.kept)


def with_outputs(model, rank, step, backward, no_sync):
    backward(getattr(model, "module", model).loss(model(share(rank, step))))


class Checkpointed(nn.Module):
    """Some layers are computed again in the backward pass."""

    def __init__(self, layers, reentrant, way="tensor"):
        super().__init__()
        self.blocks = nn.ModuleList(net(6, 6) for _ in range(4))
        self.layers, self.reentrant, self.way = layers, reentrant, way

    def forward(self, x):
        x.requires_grad_()
        for i, block in enumerate(self.blocks):
            again = i in self.layers
            x = checkpoint(block, x, use_reentrant=self.reentrant) if again else block(x)
            x = x.tanh() if i < 3 else x
        return Result(x) if self.way == "dataclass" else x


def checkpointed_result(model, rank, step, backward, no_sync):
    backward(loss_of(model(share(rank, step)).logits))


def recomputed(reentrant, model, rank, step, backward, no_sync):
    """The whole model is computed again."""
    x = share(rank, step).requires_grad_()
    backward(loss_of(checkpoint(model, x, use_reentrant=reentrant)))


def partly(freeze):
    model = net()
    for i in freeze:
        model[i].requires_grad_(False)
    return model


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = net(6, 6), net(6, 6)
        self.second[0].weight = self.first[0].weight
        self.third = self.first

    def forward(self, x):
        return self.third(self.second(self.first(x)))


MODELS = {
    "layouts": (Odd, plainly),
    "dtypes": (Mixed, plainly),
    "frozen first": (partial(partly, [0]), plainly),
    "frozen last": (partial(partly, [4]), plainly),
    "tied": (Tied, plainly),
    "tied, accumulated": (Tied, accumulate),
    "one parameter": (partial(net, 6, 3), plainly),
    "checkpoint of the whole": (net, partial(recomputed, False)),
    "reentrant checkpoint of the whole": (net, partial(recomputed, True)),
    "reentrant checkpoint, hidden": (
        partial(Checkpointed, [2, 3], True, "dataclass"),
        checkpointed_result,
    ),
}
for _way in ("nested", "dataclass", "kept", "parameter", "input"):
    MODELS[f"outputs, {_way}"] = (partial(Outputs, _way), with_outputs)
for _reentrant in (True, False):
    for _layers in ([0], [1, 2], [3], [0, 1, 2, 3]):
        MODELS[f"checkpoint of {_layers}, {_reentrant}"] = (
            partial(Checkpointed, _layers, _reentrant),
            plainly,
        )


@pytest.mark.parametrize("bucket_cap_mb", [TINY, 25])
@pytest.mark.parametrize("name", MODELS)
def test_any_model_has_the_gradients_of_one_process(pools, name, bucket_cap_mb):
    assert pools(2)(compare, *MODELS[name], bucket_cap_mb=bucket_cap_mb) == [None] * 2


# ---- construction -----------------------------------------------------------------------------


class Buffers(nn.Module):
    """Buffers of all dtypes and layouts, other values on each rank; alone, or many."""

    def __init__(self, rank, dtypes, shape=(2, 3)):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 2), rank + 1.0).t())
        for i, dtype in enumerate(dtypes):
            tensor = (torch.arange(6).view(shape) * (rank + 1) % 5).to(dtype)
            self.register_buffer(f"plain{i}", tensor)
            if len(dtypes) > 1:
                self.register_buffer(f"turned{i}", tensor.t().contiguous().t())
                self.register_buffer(f"scalar{i}", tensor[1, 1].clone())
                self.register_buffer(f"empty{i}", tensor[:0])


DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16]
DTYPES += [torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint32]


def test_every_rank_takes_what_rank_0_has(pools):
    def differ():
        rank, _ = here()
        wrong = []
        for dtypes in (DTYPES, *([dtype] for dtype in DTYPES)):
            module, theirs = Buffers(rank, dtypes), Buffers(0, dtypes).state_dict()
            layout = [tensor.stride() for tensor in module.state_dict().values()]
            OURS(module)
            state = module.state_dict()
            if [tensor.stride() for tensor in state.values()] != layout:
                wrong.append(f"{dtypes}: strides")
            wrong += [f"{dtypes}: {k}" for k in state if state[k].tolist() != theirs[k].tolist()]
        return wrong

    assert pools(3)(differ) == [[]] * 3


def _views(rank):
    """Of numbers that differ by the rank: tensors that are no plain memory of their elements."""
    many = torch.arange(1.0, 7.0, dtype=torch.float64) * (rank + 1)
    table = torch.polar(many, many)
    return {
        "conjugated": table.conj(),
        "negated": table.conj().imag,
        "with gaps": many[::2],
        "one of every second": many[::2][:1],
        "one of a column": many.view(2, 3)[:1, :1],
        "a single conjugated": table[::3].conj()[1:],
    }


@pytest.mark.parametrize("names", [*_views(0), ", ".join(_views(0))])
def test_buffers_may_be_views_of_any_kind(pools, names):
    names = [name for name in _views(0) if name in names]

    def take():
        rank, _ = here()
        module, theirs, views = nn.Linear(2, 2), _views(0), _views(rank)
        for number, name in enumerate(names):
            module.register_buffer(f"view{number}", views[name])
        OURS(module)
        return [name for name in names if views[name].tolist() != theirs[name].tolist()]

    assert pools(2)(take) == [[]] * 2


def test_more_than_a_message_of_state_is_broadcast(pools):
    def broadcast():
        rank, _ = here()
        sizes = [3 * 2**20, 5, 7 * 2**20, 1, 0, 2**20]  # of float32: a message takes 25 MiB
        tensors = [torch.full((n,), rank + n % 11 + 1.0) for n in sizes]
        tensors.append(torch.full((3,), rank + 1.0, dtype=torch.float64))
        with md.measure.TrafficCounter() as traffic:
            broadcast_state(tensors, dist.group.WORLD, source=1)
        for dtype in DTYPES:  # one alone
            alone = torch.tensor([rank, 1, 0]).to(dtype)
            broadcast_state([alone], dist.group.WORLD, source=1)
            assert alone.tolist() == torch.tensor([1, 1, 0]).to(dtype).tolist(), dtype
        right = all((t == 2 + n % 11).all() for t, n in zip(tensors, sizes, strict=False))
        return right and tensors[-1].tolist() == [2.0] * 3, traffic.calls

    nbytes = 4 * (11 * 2**20 + 6) + 24
    assert pools(2)(broadcast) == [(True, {"broadcast": (3, nbytes)})] * 2


def _wrong(change):
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    change(module)
    return module


DIFFERENCES = {
    "shape": (
        lambda m: setattr(m, "0", nn.Linear(4, 2)),
        "rank 0: parameter 0.weight, shape (2, 3), float32\n"
        "  rank 1: parameter 0.weight, shape (2, 4), float32",
    ),
    "dtype": (
        lambda m: m[0].bias.data.__class__ and m.double(),
        "rank 1: parameter 0.weight, shape (2, 3), float64",
    ),
    "name": (
        lambda m: m.append(m[1]) and m.__delattr__("1"),
        "rank 1: parameter 2.weight, shape (2,), float32",
    ),
    "one less": (
        lambda m: setattr(m, "1", nn.BatchNorm1d(2, affine=False)),
        "rank 0: parameter 1.weight, shape (2,), float32\n  rank 1: buffer 1.running_mean",
    ),
    "frozen": (
        lambda m: m[1].bias.requires_grad_(False),
        "rank 0: parameter 1.bias, shape (2,), float32\n"
        "  rank 1: parameter 1.bias, shape (2,), float32, frozen",
    ),
    "buffers": (
        lambda m: setattr(m[1], "num_batches_tracked", torch.tensor(0, dtype=torch.int32)),
        "rank 1: buffer 1.num_batches_tracked, shape (), int32",
    ),
    "a buffer more": (
        lambda m: m.register_buffer("more", torch.zeros(1)),
        "rank 0: buffer 1.running_mean, shape (2,), float32\n  rank 1: buffer more",
    ),
    "no more": (
        lambda m: m.append(nn.Linear(1, 1)),
        "rank 1: parameter 2.weight",
    ),
    "tied": (
        lambda m: setattr(m[1], "bias", m[1].weight),
        "rank 0: parameter 1.bias, shape (2,), float32\n  rank 1: buffer 1.running_mean",
    ),
    "layout": (
        lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(3, 2).t())),
        "rank 0: parameter 0.weight, shape (2, 3), float32\n"
        "  rank 1: parameter 0.weight, shape (2, 3), float32, strides (1, 2)",
    ),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_different_models_are_refused_on_every_rank(pools, what):
    change, words = DIFFERENCES[what]

    def wrap():
        try:
            OURS(_wrong(change if dist.get_rank() == 1 else lambda m: None))
        except ValueError as error:
            return str(error)

    for told in pools(3)(wrap):
        assert told.startswith("the ranks have different models. The first difference:\n  rank 0: ")
        assert words in told and "rank 2" not in told


def test_what_cannot_be_wrapped(pools):
    with pytest.raises(RuntimeError, match="md.ranks or md.launch; or call .*init_process_group"):
        OURS(nn.Linear(2, 2))

    def refuse():
        told = []
        group = dist.new_group([0])
        for module, options in (
            (nn.ReLU(), {}),
            (nn.Linear(2, 2).requires_grad_(False), {}),
            (nn.Linear(2, 2), {"bucket_cap_mb": 0}),
            (nn.Linear(2, 2), {"process_group": group}),
        ):
            try:
                OURS(module, **options)
                told.append("nothing")
            except ValueError as error:
                told.append(str(error))
        return told

    for rank, told in enumerate(pools(2)(refuse)):
        assert told[:3] == ["DistributedDataParallel: the module has no parameter to train"] * 2 + [
            "bucket_cap_mb must be more than 0, not 0"
        ]
        outside = "DistributedDataParallel: rank 1 is not in the process group it was given"
        assert told[3] == ("nothing" if rank == 0 else outside)


def test_a_group_trains_among_its_members(pools):
    def train():
        rank, _ = here()
        group = dist.new_group([2, 0])
        if rank == 1:
            return None
        module = net().requires_grad_()
        with torch.no_grad():
            module[0].weight += rank
        ddp, plain = OURS(module, process_group=group, bucket_cap_mb=TINY), net()
        for r in (0, 2):
            (loss_of(plain(share(r))) / 2).backward()
        loss_of(ddp(share(rank))).backward()
        return apart(module, plain)

    assert pools(3)(train) == [[], None, []]


def test_the_checkpoint_is_the_bare_modules_and_no_wrapper_stays_behind(pools):
    def wrap_twice():
        rank, _ = here()
        module = net()
        for _ in range(2):
            ddp = OURS(nn.Sequential(module, nn.Identity()), bucket_cap_mb=TINY)
            assert list(ddp.state_dict()) == list(nn.Sequential(module).state_dict())
            plain = net()
            one_process(plain, plainly, 0)
            module.zero_grad()
            gone, loss = weakref.ref(ddp._reducer), loss_of(ddp(share(rank)))
            del ddp  # not before it has averaged
            loss.backward()
            assert apart(module, plain) == []
            del loss
            gc.collect()
            assert gone() is None
            assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
        plain = net()
        one_process(plain, plainly, 0)
        loss_of(plain(share(rank))).backward()
        loss_of(module(share(rank))).backward()  # is not averaged any more
        return apart(module, plain)

    assert pools(2)(wrap_twice) == [[], []]


def test_of_two_wrappers_the_one_in_use_averages(pools):
    def train():
        rank, _ = here()
        module, plain = net(), net()
        several = [OURS(module, bucket_cap_mb=cap) for cap in (TINY, 25, 25)]
        for step in range(6):
            loss_of(several[step % 2](share(rank, step)), step).backward()
            one_process(plain, plainly, step)
        return apart(module, plain)

    assert pools(2)(train) == [[], []]


def test_a_wrapper_within_a_module(pools):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = net(6, 6), OURS(net(6, 6), bucket_cap_mb=TINY)

        def forward(self, x):
            return self.second(self.first(x))

    def train():
        rank, _ = here()
        outer, plain = Outer(), nn.Sequential(net(6, 6), net(6, 6))
        one_process(plain, plainly, 0)
        loss_of(outer(share(rank))).backward()
        return apart(outer.second.module, plain[1])

    assert pools(2)(train) == [[], []]


# ---- buckets ----------------------------------------------------------------------------------


def parameters(*sizes, dtype=torch.float32):
    return [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in sizes]


def positions(plan, of):
    numbers = {parameter: i for i, parameter in enumerate(of)}
    return [[numbers[parameter] for parameter in bucket] for bucket in plan]


def test_parameters_are_put_into_buckets():
    mega = 2**18  # float32: 1 MiB
    ps = parameters(mega // 2, mega // 4, mega // 4, mega, mega * 2, 1, mega * 9, 5, mega)
    assert positions(assign(ps, 3 * 2**20), ps) == [[0, 1, 2], [3, 4], [5, 6], [7, 8]]
    assert positions(assign(ps[:2], 2**30), ps) == [[0, 1]]
    assert positions(assign(ps, 1), ps) == [[i] for i in range(9)]  # below 1 MiB: the first as well
    ps = parameters(4, 4, 4) + parameters(2, 2, 2, dtype=torch.float64) + parameters(4, 4)
    ps = [ps[i] for i in (0, 3, 1, 4, 2, 5, 6, 7)]  # two dtypes, one after the other
    assert positions(assign(ps, 32), ps) == [[0, 2], [1, 3], [5], [4, 6], [7]]
    assert assign([], 1) == []


@pytest.mark.parametrize("cap", [100, 2**20, 3 * 2**20, 25 * 2**20])
def test_torch_has_the_same_buckets(cap):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(1, [50, 2**18, 2**20][seed % 3], (12,), generator=generator).tolist()
        ps = parameters(*sizes)
        theirs, _ = dist._compute_bucket_assignment_by_size(ps, [min(2**20, cap), cap])
        assert positions(assign(ps, cap), ps) == theirs


class Backwards(nn.Module):
    """Uses its layers in another order than it names them; a rank may use two in turns."""

    def __init__(self, turned=False):
        super().__init__()
        self.last, self.a, self.first, self.b = (nn.Linear(6, 6).double() for _ in range(4))
        self.turned = turned

    def forward(self, x):
        x = self.first(x).tanh()
        x = self.b(x) + self.a(x) if self.turned else self.a(x) + self.b(x)
        return self.last(x)


def recorder(ddp):
    """A hook that averages, and the names of what it has sent: a list of buckets."""
    names, sent = {p: name for name, p in ddp.module.named_parameters()}, []

    def hook(_, bucket: dist.GradBucket):
        sent.append([names[p] for p in bucket.parameters()])
        return default_hooks.allreduce_hook(None, bucket)

    ddp.register_comm_hook(None, hook)
    return sent


def test_buckets_are_made_anew_in_the_order_of_arrival_on_rank_0(pools):
    def run(sync_first):
        rank, _ = here()
        torch.manual_seed(0)
        module = Backwards(turned=rank == 1)
        plain = copy.deepcopy(module)
        ddp, orders = OURS(module, bucket_cap_mb=200 / 2**20), []
        sent = recorder(ddp)
        for step in range(4):
            with contextlib.nullcontext() if sync_first or step else ddp.no_sync():
                loss_of(ddp(share(rank, step)), step).backward()
            one_process(plain, plainly, step)  # gradients add up
            orders.append(list(sent))
            sent.clear()
        return orders, apart(module, plain) if sync_first else []

    def pairs(*names):
        return [[f"{name}.{kind}"] for name in names for kind in ("weight", "bias")]

    for sync_first in (True, False):
        results = pools(3)(run, sync_first)
        assert [wrong for _, wrong in results] == [[]] * 3
        orders = results[0][0]
        assert [order for order, _ in results] == [orders] * 3
        if not sync_first:
            assert orders.pop(0) == []
        first, *later = orders
        assert first == [["b.bias", "b.weight"], ["first.bias", "first.weight"]] + [
            ["a.bias", "a.weight"],
            ["last.bias", "last.weight"],
        ]
        assert all(order == later[0] for order in later)
        assert [name.split(".")[0] for name in sum(later[0], [])[::2]] == [
            "last",
            "b",
            "a",
            "first",
        ]


def test_torch_makes_the_same_buckets_anew(pools):
    def buckets(wrap):
        rank, _ = here()
        ddp = wrap(Backwards(turned=rank == 1), bucket_cap_mb=400 / 2**20)
        sent = recorder(ddp)
        for step in range(3):
            loss_of(ddp(share(rank, step))).backward()
        return sent[-2:]  # (in the first pass, torch has but one)

    assert pools(3)(buckets, OURS) == pools(3)(buckets, TorchDDP)


def test_gradients_lie_in_the_buckets_with_the_strides_of_their_parameters(pools):
    def look():
        rank, _ = here()
        module = Odd()
        ddp = OURS(module)
        for way in (plainly, accumulate, plainly):
            way(ddp, rank, 0, torch.Tensor.backward, ddp.no_sync)
            memories = {p.grad.untyped_storage().data_ptr() for p in module.parameters()}
            assert len(memories) == 1
            assert len({p.grad.storage_offset() for p in module.parameters() if p.numel()}) == 5
            for name, p in module.named_parameters():
                dense = {"gaps": (4, 1)}.get(name, p.stride())
                assert p.grad.stride() == dense, name
        (memory,) = memories
        assert next(module.parameters()).grad.untyped_storage().nbytes() == 8 * 68
        for grad in [p.grad for p in module.parameters()]:
            grad.mul_(2)  # as clip_grad_norm_ does
        module.zero_grad()
        return True

    assert pools(2)(look) == [True, True]


@pytest.mark.parametrize("foreach", [False, True])
def test_clipped_gradients_and_optimizers_that_take_all_at_once(pools, foreach):
    def compare_clipped():
        rank, _ = here()
        module, plain = smooth_seeded(), smooth_seeded()
        ddp = OURS(module, bucket_cap_mb=TINY)
        ours, theirs = (
            torch.optim.AdamW(m.parameters(), lr=0.1, foreach=foreach) for m in (ddp, plain)
        )
        for i in range(4):
            for model, optimizer in ((ddp, ours), (plain, theirs)):
                optimizer.zero_grad(set_to_none=foreach)
                if model is ddp:
                    loss_of(ddp(share(rank, i)), i).backward()
                else:
                    one_process(plain, plainly, i)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
                optimizer.step()
        return apart(module, plain)

    def smooth_seeded():
        torch.manual_seed(0)
        return smooth()

    assert pools(2)(compare_clipped) == [[], []]


# ---- overlap ----------------------------------------------------------------------------------


def test_the_first_bucket_leaves_before_the_last_gradient_exists(pools):
    def record():
        rank, _ = here()
        module, events = net(6, 6, 6, 6), []
        for name, p in module.named_parameters():
            p.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
        ddp = OURS(module, bucket_cap_mb=TINY)
        send, dist.all_reduce = dist.all_reduce, lambda *a, **k: events.append("*") or send(*a, **k)
        try:
            loss_of(ddp(share(rank))).backward()
        finally:
            dist.all_reduce = send
        return " ".join(events)

    expected = "4.bias 4.weight * 2.bias 2.weight * 0.bias 0.weight *"
    for events in pools(2)(record):
        assert events.replace("weight 4.bias", "") in (
            expected,
            "4.weight 4.bias * 2.weight 2.bias * 0.weight 0.bias *",
        )


def test_the_bytes_are_those_of_the_gradients(pools):
    def count(bucket_cap_mb, **options):
        rank, _ = here()
        module = md.zoo.convnet().double()
        ddp, calls = OURS(module, bucket_cap_mb=bucket_cap_mb, **options), []
        for step in range(3):
            with md.measure.TrafficCounter() as traffic:
                loss_of(ddp(share(rank, step, 5, 64))).backward()
            calls.append(traffic.calls)
        return calls

    total = 8 * sum(p.numel() for p in md.zoo.convnet().parameters())
    buffers = 8 * (8 + 8 + 1)
    for calls in pools(2)(count, 25):
        assert calls == [
            {"all_reduce": (1, total), "broadcast": (1, buffers)},
            {"all_reduce": (1, total), "broadcast": (2, 5 * 8 + buffers)},  # and their order, once
            {"all_reduce": (1, total), "broadcast": (1, buffers)},
        ]
    for calls in pools(2)(count, 1e-9, broadcast_buffers=False, find_unused_parameters=True):
        assert calls == [{"all_reduce": (6, total + 5)}] * 3


# ---- parameters without gradient --------------------------------------------------------------


class Output:
    """No dataclass, and no tree that torch knows."""

    def __init__(self, y):
        self.y, self.words = [y], "some"


def test_unused_parameters_of_a_model_that_gives_an_object(pools):
    class InObject(Branches):
        def forward(self, x, use):
            return Output(super().forward(x, use))

    def train():
        rank, size = here()
        ddp, plain = OURS(InObject(), find_unused_parameters=True, bucket_cap_mb=TINY), Branches()
        loss_of(ddp(share(rank), "abc"[rank]).y[0]).backward()
        for r in range(size):
            (loss_of(plain(share(r), "abc"[r])) / size).backward()
        return apart(ddp.module, plain)

    assert not any(pools(3)(train))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (net(6, 3) for _ in range(4))

    def forward(self, x, use):
        return sum(getattr(self, name)(x) for name in use)


USES = {  # by step and rank
    "on one rank": [("abcd", "abc", "abcd")] * 3,
    "on all ranks": [("abd", "abd", "abd")] * 3,
    "other ones on each": [("a", "ab", "c")] * 3,
    "other ones at each step": [("ab", "ab", "c"), ("a", "a", "a"), ("abc", "b", "d")],
}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("name", USES)
def test_parameters_may_be_left_without_gradient(pools, name, no_sync, set_to_none):
    """As torch has it, and as one process that takes all ranks' examples."""

    def train():
        rank, size = here()
        models = [Branches() for _ in range(3)]
        options = {"find_unused_parameters": True, "bucket_cap_mb": TINY}
        models[:2] = OURS(models[0], **options), TorchDDP(models[1], **options)
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in models]
        for step, uses in enumerate(USES[name]):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad(set_to_none=set_to_none)
                if no_sync:  # the ranks use a branch more, each another one
                    for r in [rank] if model is not models[2] else range(size):
                        with getattr(model, "no_sync", contextlib.nullcontext)():
                            loss = loss_of(model(share(r, step), "dca"[r]))
                            (loss if model is not models[2] else loss / size).backward()
                if model is models[2]:
                    for r, use in enumerate(uses):
                        (loss_of(model(share(r, step), use)) / size).backward()
                else:
                    loss_of(model(share(rank, step), uses[rank])).backward()
                optimizer.step()
            for model, optimizer in zip(models[:2], optimizers, strict=False):
                if found := apart(model.module, models[2]):
                    return f"{type(model).__module__}, step {step}: {found}"
                if len(optimizer.state) != len(optimizers[2].state):
                    return f"{type(model).__module__}, step {step}: states"
        return None

    assert pools(3)(train) == [None] * 3


# ---- communication hooks ----------------------------------------------------------------------


def power():
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)


def renamed(hook):
    """By its name, torch takes bfloat16 for NCCL only."""

    def passing_on(state, bucket: dist.GradBucket):
        return hook(state, bucket)

    return passing_on


HOOKS = {
    "none": None,
    "torch's mean": (lambda: None, default_hooks.allreduce_hook),
    "bfloat16": (lambda: None, renamed(bf16_compress_hook)),
    "torch's bfloat16": (lambda: None, renamed(default_hooks.bf16_compress_hook)),
    "torch's float16": (lambda: None, default_hooks.fp16_compress_hook),
    "PowerSGD": (power, powerSGD_hook.powerSGD_hook),
    "bfloat16, then PowerSGD": (
        power,
        renamed(default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
    ),
}


def trained_with(wrap, hook, steps=5):
    rank, _ = here()
    module = net(6, 16, 16, 3, dtype=torch.float32)
    ddp = wrap(module)
    if HOOKS[hook]:
        make_state, function = HOOKS[hook]
        ddp.register_comm_hook(make_state(), function)
    for step in range(steps):
        loss_of(ddp(share(rank, step, dtype=torch.float32))).backward()
        for p in module.parameters():
            p.data -= 0.02 * p.grad
            p.grad = None
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_do_in_ours_what_they_do_in_torchs(pools, hook):
    ours, theirs, exact = (
        pools(3)(trained_with, *which)
        for which in ((OURS, hook), (TorchDDP, hook), (TorchDDP, "none"))
    )
    for of_ranks in (ours, theirs):
        assert all(torch.equal(of_ranks[0], other) for other in of_ranks)
    rough = hook not in ("none", "torch's mean")  # then sums in another order differ more
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=2e-3 if rough else 1e-6)
    assert torch.allclose(ours[0], exact[0], rtol=1e-5, atol=1e-6) != rough
    assert torch.allclose(ours[0], exact[0], atol=1 if "Power" in hook else 0.01)


def test_torch_accepts_our_hook_but_for_its_name_without_nccl(pools):
    def register():
        try:
            TorchDDP(net()).register_comm_hook(None, bf16_compress_hook)
        except TypeError as error:
            return str(error)

    for told in pools(2)(register):
        assert "required CUDA 11+ and NCCL" in told


def test_what_is_wrong_with_a_hook_surfaces(pools):
    def run():
        rank, _ = here()
        told = []

        def wrong_future(_, bucket):
            future = torch.futures.Future()
            future.set_exception(ValueError("of the future"))
            return future

        def raises(_, bucket):
            raise KeyError("of the hook")

        for hook in (wrong_future, raises):
            ddp = OURS(net(), bucket_cap_mb=TINY)
            ddp.register_comm_hook(None, hook)
            try:
                loss_of(ddp(share(rank))).backward()
            except (ValueError, KeyError) as error:
                told.append(str(error))
        for hook in (raises, 3):
            try:
                (ddp if hook == raises else OURS(net())).register_comm_hook(None, hook)
            except (RuntimeError, TypeError) as error:
                told.append(str(error))
        return told

    assert (
        pools(2)(run)
        == [
            [
                "of the future",
                "'of the hook'",
                "a communication hook is registered already",
                "a communication hook is a function, not int",
            ]
        ]
        * 2
    )


# ---- buffers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_running_means_are_rank_0s_when_torchs_are(pools, broadcast_buffers):
    def train():
        rank, _ = here()
        images, labels = md.zoo.digits(torch.float64)
        options = {"bucket_cap_mb": TINY}
        models = [md.zoo.convnet().double(), md.zoo.convnet().double()]
        ours = OURS(models[0], broadcast_buffers=broadcast_buffers, **options)
        theirs = TorchDDP(models[1], forward_sync_buffers=broadcast_buffers, **options)
        seen = []
        for number, kind in enumerate("TTETAETTNTE"):
            x, y = images[rank + number :: 100], labels[rank + number :: 100]
            for ddp in (ours, theirs):
                ddp.train(kind not in "EA")
                with ddp.no_sync() if kind == "N" else contextlib.nullcontext():
                    with torch.set_grad_enabled(kind != "E"):  # A: evaluation with gradients
                        output = ddp(x)
                    if kind != "E":
                        nn.functional.cross_entropy(output, y).backward()
                ddp.output = output.detach()
            seen.append(models[0][2].running_mean.tolist())
            if found := apart(*models):
                return f"{number}: {found}"
            if not torch.equal(ours.output, theirs.output):
                return f"{number}: output"
        return seen

    zero, one = pools(2)(train)
    assert isinstance(zero, list), zero
    together = [a == b for a, b in zip(zero, one, strict=True)]
    # Equal at the forward pass for evaluation after one for training, not by one for training.
    assert together == [broadcast_buffers and kind in "EA" for kind in "TTETAETTNTE"]


def test_a_pass_that_is_computed_again_broadcasts_nothing(pools):
    def count():
        rank, _ = here()
        ddp, images = OURS(md.zoo.convnet().double()), md.zoo.digits(torch.float64)[0]
        for _ in range(3):
            with md.measure.TrafficCounter() as traffic:
                loss_of(checkpoint(ddp, images[rank:20:2], use_reentrant=False)).backward()
        return {name: calls for name, (calls, _) in traffic.calls.items()}

    assert pools(2)(count) == [{"all_reduce": 1, "broadcast": 1}] * 2


def twice(wrap, **options):
    rank, _ = here()
    module, plain = md.zoo.convnet().double(), md.zoo.convnet().double()
    ddp = wrap(module, **options)
    images, _ = md.zoo.digits(torch.float64)
    (loss_of(ddp(images[rank:40:2])) + loss_of(ddp(images[40 + rank : 80 : 2]))).backward()
    for r in range(2):
        loss = loss_of(plain(images[r:40:2])) + loss_of(plain(images[40 + r : 80 : 2]))
        (loss / 2).backward()
    return [words for words in apart(module, plain) if "grad" in words]


@pytest.mark.parametrize("wrap", [OURS, TorchDDP], ids=["ours", "torchs"])
def test_two_forward_passes_of_batch_norm_before_a_backward_pass(pools, wrap):
    """Between them, rank 0's means arrive where autograd has kept the first ones."""
    assert pools(2)(twice, wrap) == [[], []]


# ---- a model that is not what it was, and passes that fail ------------------------------------


def blamed(pool, function, *args):
    """The error of a call; the next one works."""
    with pytest.raises(md.RankError) as raised:
        pool(function, *args)
    assert pool(compare, net, plainly) == [None, None]
    return raised.value


def unfinished(which, wrong_rank):
    """A pass that is not the same on a rank, or on all."""
    rank, _ = here()
    model = Branches()
    # (Of several messages in vain, gloo calls some a timeout, and some not.)
    ddp = OURS(model, bucket_cap_mb=25 if which == "none" else TINY)
    loss_of(ddp(share(rank), "abcd")).backward()
    if wrong_rank not in (None, rank):
        loss_of(ddp(share(rank), "abcd")).backward()
    elif which == "unused":
        loss_of(ddp(share(rank), "ad")).backward()
    elif which == "frozen":
        model.b.requires_grad_(False)
        loss_of(ddp(share(rank), "abcd")).backward()
    elif which == "replaced":
        model.c[0].weight = nn.Parameter(model.c[0].weight.detach().clone())
        loss_of(ddp(share(rank), "abcd")).backward()
    elif which == "inputs":
        loss_of(ddp(share(rank), "abcd")).backward(inputs=[*model.a.parameters()])
    elif which == "none":
        ddp(share(rank), "abcd")
    elif which == "shape":
        model.d[0].bias.data = torch.zeros(1, 3, dtype=torch.float64)
        ddp(share(rank), "abcd")
    elif which == "dtype":
        model.float()
        ddp(share(rank).float(), "abcd")
    elif which == "create_graph":
        loss_of(ddp(share(rank), "abcd")).backward(create_graph=True)
    elif which == "twice":
        x = share(rank).requires_grad_()
        halves = [checkpoint(ddp.module, x, use, use_reentrant=True) for use in ("ab", "acd")]
        ddp._reducer.watch(halves)
        loss_of(sum(halves)).backward()


NO_GRADIENT = "this backward pass gave no gradient to {}, for which the other ranks wait. Was"
WRONG = {
    "unused": NO_GRADIENT.format("b.0.weight, b.0.bias, c.0.weight, c.0.bias"),
    "frozen": NO_GRADIENT.format("b.0.weight, b.0.bias"),
    "replaced": "parameter c.0.weight has been replaced since it was wrapped. Change a module",
    "inputs": NO_GRADIENT.format(
        "b.0.weight, b.0.bias, c.0.weight, c.0.bias, d.0.weight and 1 more"
    ),
    "shape": "parameter d.0.bias has changed since it was wrapped, from shape (3,), float64, on "
    "cpu to shape (1, 3), float64, on cpu. Change",
    "dtype": "parameter a.0.weight has changed since it was wrapped, from shape (3, 6), float64, "
    "on cpu to shape (3, 6), float32, on cpu.",
    "create_graph": "gradients of gradients are not averaged: create_graph=True",
    "twice": "the gradient of a.0.",
}


@pytest.mark.parametrize("which", WRONG)
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_a_pass_that_cannot_be_averaged_names_the_rank_and_why(pools, monkeypatch, which):
    error = blamed(pools(2), unfinished, which, 1)
    assert error.rank == 1
    assert f"rank 1 raised RuntimeError: {WRONG[which]}" in str(error)
    monkeypatch.setattr("minidist.runtime.processes.GRACE", 20)  # each has an error of its own
    error = blamed(pools(2), unfinished, which, None)
    assert str(error).startswith(f"every rank raised RuntimeError: {WRONG[which]}")


def test_a_sparse_gradient_is_refused(pools):
    def train():
        OURS(nn.Embedding(3, 2, sparse=True))(torch.tensor([dist.get_rank()])).sum().backward()

    error = blamed(pools(2), train)
    assert "RuntimeError: a sparse gradient has no place in a bucket" in str(error)


def test_a_rank_without_a_backward_pass_is_named():
    with md.ranks(2, timeout=3) as pool:
        error = blamed(pool, unfinished, "none", 1)
    assert str(error).startswith("rank 1 did not join backward within 3 s. It had finished.")


def test_after_a_pass_that_failed_no_sync_is_not_averaged(pools):
    def train():
        rank, _ = here()
        module = smooth()
        ddp, plain = OURS(module), copy.deepcopy(module)
        hook = module[0].bias.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(ddp(share(rank, 0)), 0).backward()
        hook.remove()
        module.zero_grad()
        with ddp.no_sync():
            loss_of(ddp(share(rank, 1)), 1).backward()
        loss_of(plain(share(rank, 1)), 1).backward()
        return apart(module, plain)

    assert pools(2)(train) == [[], []]


@pytest.mark.parametrize("late", [0, 1])
def test_after_a_pass_that_failed_everywhere_the_next_one_is_right(pools, late):
    """Even if messages of the first still come, from a rank that is late; and if it is only tried
    again."""

    def train():
        rank, _ = here()
        module = smooth()
        ddp, plain = OURS(module, bucket_cap_mb=TINY), copy.deepcopy(module)
        for step in range(6):
            fails = [step % 2 == 1]

            def interfere(grad, fails=fails):
                if fails.pop():
                    fails.append(False)
                    time.sleep(0.05 if rank == late else 0)
                    raise ValueError("in the middle")
                fails.append(False)

            def watch(_, inputs, output, interfere=interfere):
                output.register_hook(interfere)

            def delay(_, inputs, output, step=step):
                hook = time.sleep if step % 2 and rank == late else id
                output.register_hook(lambda _: hook(0.05) and None)

            handles = [module[1].register_forward_hook(watch)]
            handles += [module[4].register_forward_hook(delay)]
            loss = loss_of(ddp(share(rank, step)), step)
            for handle in handles:
                handle.remove()
            try:
                loss.backward(retain_graph=True)
            except ValueError:
                module.zero_grad(set_to_none=step != 3)
                if step == 1:
                    continue
                loss.backward()
            plain.zero_grad()
            one_process(plain, plainly, step)
            if found := apart(module, plain):
                return f"{step}: {found}"
            module.zero_grad()
        return None

    assert pools(2)(train) == [None, None]


# ---- ranks with different numbers of batches --------------------------------------------------


class Switching(nn.Module):
    """Batch norm, layers in another order than registered, and a branch that is not always used."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(6, 3).double(), nn.Linear(6, 6).double()
        self.norm, self.branch = nn.BatchNorm1d(6).double(), nn.Linear(6, 6).double()

    def forward(self, x, branch=True):
        x = self.norm(self.first(x).tanh())
        return self.last(self.branch(x) + x if branch else x)


def train_unevenly(wrap, counts, divide, unused, no_sync):
    """Each rank has a number of batches of its own; what all ranks have in the end."""
    rank, _ = here()
    torch.manual_seed(0)
    module = Switching()
    ddp = wrap(module, bucket_cap_mb=TINY, find_unused_parameters=unused)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9)
    with ddp.join(divide_by_initial_world_size=divide):
        for step in range(counts[rank]):
            if not no_sync or step % 3 == 0:
                optimizer.zero_grad()
            if no_sync and step % 3 != 2:
                with ddp.no_sync():
                    loss_of(ddp(share(rank, step)), step).backward()
                continue
            loss_of(ddp(share(rank, step), not unused or step % 2 == 0), step).backward()
            if step == 1 and wrap is OURS:  # torch's others wait for gradients then
                with torch.no_grad():
                    ddp.eval()(share(rank, step))
                ddp.train()
            optimizer.step()
    optimizer.zero_grad()
    state = {name: tensor.tolist() for name, tensor in module.state_dict().items()}
    loss_of(ddp(share(rank, 9)), 9).backward()  # and on, all together
    return state, {name: p.grad.tolist() for name, p in module.named_parameters()}


def alone(counts, divide):
    """One process that takes the batches of all ranks that still have some."""
    torch.manual_seed(0)
    plain = Switching()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.02, momentum=0.9)
    for step in (*range(max(counts)), 9):
        there = [r for r, count in enumerate(counts) if count > step or step == 9]
        state = {name: tensor.tolist() for name, tensor in plain.state_dict().items()}
        optimizer.zero_grad()
        for r in there:
            loss = loss_of(plain(share(r, step), step % 2 == 0 or step == 9), step)
            (loss / (len(counts) if divide else len(there))).backward()
        if step != 9:
            optimizer.step()
    del state["norm.num_batches_tracked"]
    return state, {name: p.grad.tolist() for name, p in plain.named_parameters()}


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize(
    ("counts", "unused", "no_sync"),
    [
        ((4, 6, 5), False, False),
        ((1, 3, 6), False, False),  # rank 0 is out before the buckets are made anew
        ((0, 3, 2), False, False),
        ((5, 1, 0), True, False),
        ((2, 2, 2), False, False),
        ((6, 9, 3), False, True),
    ],
    ids=str,
)
def test_ranks_may_have_different_numbers_of_batches(pools, counts, unused, no_sync, divide):
    arguments = counts, divide, unused, no_sync
    ours = pools(3)(train_unevenly, OURS, *arguments)
    # In torch's join, what no rank uses has a gradient of zeros, which moves a momentum.
    theirs = [alone(counts, divide)] if unused else pools(3)(train_unevenly, TorchDDP, *arguments)
    assert ours == [ours[0]] * 3
    for found, expected in zip(ours[0], theirs[0], strict=True):
        for name in expected:
            # As long as it has batches, rank 0's means are everyone's. In torch it is the last's.
            if "running" not in name:
                a, b = (torch.tensor(state[name]).double() for state in (found, expected))
                assert md.parity.relative_difference(a, b) < 1e-6, name


ONLY_OURS = "evaluates", "accumulates", "freezes", "validates"


@pytest.mark.parametrize("counts", [(4, 2, 3), (0, 3, 1)], ids=str)
@pytest.mark.parametrize("wrap", [OURS, TorchDDP], ids=["ours", "torch's"])
@pytest.mark.parametrize(
    "habit", ["none", "clips", "schedules", "zeroes", "joins again", *ONLY_OURS]
)
def test_ranks_that_are_out_still_update_their_shard(pools, counts, wrap, habit):
    """Torch's `Join` of a model and of an optimizer that shares out its states."""
    if wrap is TorchDDP and habit in ONLY_OURS:
        pytest.skip("torch's DDP does not say whether a step follows: a rank that is out takes one")
    epochs = 1 if habit == "schedules" else 2  # in another one, ranks begin with other rates

    def made():
        model = net()
        next(model.parameters()).requires_grad_(habit != "freezes")
        return model

    def take_step(model, optimizer):
        if habit == "clips":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad(set_to_none=habit != "zeroes")
        if habit == "schedules":
            optimizer.param_groups[0]["lr"] *= 0.8

    def train():
        rank, _ = here()
        ddp = wrap(made(), bucket_cap_mb=TINY)
        optimizer = md.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.02)
        join = Join([ddp, optimizer])
        for epoch in range(epochs):
            with join if habit == "joins again" else Join([ddp, optimizer]):
                for step in range(counts[rank]):
                    if habit in ("accumulates", "freezes"):
                        with ddp.no_sync():
                            loss_of(ddp(share(rank, step + 9)), step).backward()
                    loss_of(ddp(share(rank, step)), step + epoch).backward()
                    take_step(ddp, optimizer)
                    if habit == "evaluates":
                        with torch.no_grad():
                            ddp(share(rank, step))
            if habit == "validates":
                with torch.no_grad(), Join([ddp, optimizer]):
                    for step in range(counts[rank]):
                        ddp(share(rank, step))
        return torch.cat([p.detach().flatten() for p in ddp.parameters()])

    plain = made()
    adam = torch.optim.Adam(plain.parameters(), lr=0.02)
    for epoch in range(epochs):
        for step in range(max(counts)):
            for rank in [rank for rank, count in enumerate(counts) if count > step]:
                if habit in ("accumulates", "freezes"):
                    (loss_of(plain(share(rank, step + 9)), step) / 3).backward()
                (loss_of(plain(share(rank, step)), step + epoch) / 3).backward()
            take_step(plain, adam)
    wanted = torch.cat([p.detach().flatten() for p in plain.parameters()])
    found = pools(3)(train)
    assert max(md.parity.relative_difference(x, wanted) for x in found) < 1e-6


def test_the_model_comes_before_its_optimizer(pools):
    def train():
        ddp = OURS(net())
        optimizer = md.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.02)
        with pytest.raises(RuntimeError, match="the model comes before its optimizer"):
            with Join([optimizer, ddp]):
                loss_of(ddp(share(dist.get_rank())), 0).backward()
                optimizer.step()

    pools(2)(train)


def test_torchs_join_takes_several_and_ends_all_early_if_asked(pools):
    def train(throw):
        rank, _ = here()
        ours, theirs = net(), net()
        both = OURS(ours, bucket_cap_mb=TINY), TorchDDP(theirs)
        told = None
        try:
            with Join(list(both), throw_on_early_termination=throw):
                for step in range(2 + rank):
                    for model in both:
                        loss_of(model(share(rank, step)), step).backward()
                    for p in (*ours.parameters(), *theirs.parameters()):
                        p.data -= 0.1 * p.grad
                        p.grad = None
        except RuntimeError as error:
            told = str(error)
        return apart(ours, theirs), ours[0].bias.tolist(), told

    results = pools(3)(train, False)
    assert results == [([], results[0][1], None)] * 3
    told = [told for _, _, told in pools(3)(train, True)]
    assert told[0] == "Rank 0 exhausted all inputs."
    assert told[1] == told[2] and told[1].startswith("Detected at least one rank that exhausted")


# ---- under torchrun, and on GPUs --------------------------------------------------------------


SCRIPT = """
import os
import torch
import minidist as md

def main():
    rank = torch.distributed.get_rank()
    model = md.zoo.mlp(64, 32, 10, seed=rank)
    ddp = md.DistributedDataParallel(model.to(md.rank.device()))
    images, labels = (tensor[rank::2][:50].to(md.rank.device()) for tensor in md.zoo.digits())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(ddp(images), labels).backward()
        optimizer.step()
    return model[0].bias.tolist()

if __name__ == "__main__":
    first, second = md.launch(main, world_size=2, timeout=100)
    assert first == second, (first, second)
    if os.environ.get("RANK", "0") == "0":
        print(first[:3])
"""


@pytest.mark.timeout(260)
def test_a_script_trains_under_python_and_under_torchrun(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    family = Family()
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environ = {**family.environ(), "OMP_NUM_THREADS": "1"}
    try:
        runs = [
            subprocess.Popen(
                [sys.executable, *command, "script.py"],
                env=environ,
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for command in ([], torchrun)
        ]
        (alone, told), (under, more) = (run.communicate(timeout=200) for run in runs)
        assert [run.returncode for run in runs] == [0, 0], told + more
        assert alone.count("\n") == 1 and under == alone
        assert family.gone_within(20)
    finally:
        family.end()


@pytest.mark.gpu(2)
@pytest.mark.parametrize("hook", ["none", "bfloat16"])
def test_ranks_with_a_gpu_each_train_as_one_process_does(hook):
    def strategy(module):
        ddp = OURS(module, bucket_cap_mb=0.002)
        if hook == "bfloat16":
            ddp.register_comm_hook(None, bf16_compress_hook)
        return ddp

    with md.ranks(2, backend="cpu:gloo,cuda:nccl", timeout=120) as ranks:
        for model in (md.parity.digits_mlp, md.zoo.convnet):
            md.parity.check(
                strategy,
                model=model,
                ranks=ranks,
                tolerance=0.05 if hook == "bfloat16" else None,
            )


@pytest.mark.gpu(1)
def test_a_module_may_be_split_over_devices():
    """Autograd has a thread for each; gloo, that all ranks may share one GPU."""

    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = net(6, 6, 6), net(6, 6, 6).cuda(), net(6, 6)

        def forward(self, x):
            return self.c(self.a(x) + self.b(x.cuda()).cpu())

    with md.ranks(2, backend="gloo", timeout=120) as ranks:
        for _ in range(4):
            assert ranks(compare, Split, plainly, steps=5, bucket_cap_mb=TINY) == [None, None]
