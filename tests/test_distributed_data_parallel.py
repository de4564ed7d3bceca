"""Lesson 4: ranks that average their gradients train as one process does, whatever the model and
the loop look like. Held against one process, and against torch's own DistributedDataParallel."""

import contextlib
import copy
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import minidist as md
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


def one_process(plain, way, step):
    """Go `way` for every rank, and take the mean."""
    size = dist.get_world_size()

    def backward(loss, **options):
        (loss / size).backward(**options)

    for rank in range(size):
        way(plain, rank, step, backward, contextlib.nullcontext)


def compare(make, way, steps=3, keep=False, **options):
    """On a rank: train by ours and alone, and return the first difference."""
    torch.manual_seed(0)
    module = make()
    plain, ddp = copy.deepcopy(module), OURS(module, **options)
    for step in range(steps):
        way(ddp, dist.get_rank(), step, torch.Tensor.backward, ddp.no_sync)
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


def no_sync_is_read_at_the_forward_pass(model, rank, step, backward, no_sync):
    with no_sync():
        output = model(share(rank, step))
    backward(loss_of(output, step))  # not averaged, or it would count twice as much as
    output = model(share(rank, step + 10))
    with no_sync():
        backward(loss_of(output))  # this, which is averaged


def one_of_two_forward_passes_asks(model, rank, step, backward, no_sync):
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
    torch.autograd.grad(loss_of(model(x)), x)  # adversarial inputs, and then accumulation
    with no_sync():
        plainly(model, rank, step + 10, backward, no_sync)
    loss = loss_of(model(x))
    torch.autograd.grad(loss, x, retain_graph=True)
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    backward(loss)


def gradient_penalty(model, rank, step, backward, no_sync):
    x = share(rank, step).requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(loss_of(output), x, create_graph=True)
    backward(loss_of(output) + slope.pow(2).sum())


LOOPS = [
    plainly,
    accumulate,
    no_sync_is_read_at_the_forward_pass,
    one_of_two_forward_passes_asks,
    several_backward_passes,
    forward_passes_first,
    one_backward_pass_for_several,
    retain_graph,
    evaluation_between,
    autograd_grad_passes_through,
    gradient_penalty,
]


def smooth():
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    return model.double()


@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_any_loop_gives_the_gradients_of_one_process(pools, find_unused_parameters):
    options = {"find_unused_parameters": find_unused_parameters, "bucket_cap_mb": TINY}
    for loop in LOOPS:
        run = partial(compare, smooth, loop, **options)
        assert pools(3)(run) == [None] * 3, loop.__name__
    for loop in plainly, accumulate:  # gradients that are not set to None add up
        run = partial(compare, smooth, loop, keep=True, **options)
        assert pools(3)(run) == [None] * 3, loop.__name__


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
    """In a tree that torch knows, or in a class that it does not."""

    def __init__(self, hidden):
        super().__init__()
        self.net, self.bias = net(6, 4), nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self.hidden = hidden

    def forward(self, x):
        y = self.net(x) + self.bias
        return Result(y) if self.hidden else {"a": [(y, None), "text"]}


def with_outputs(model, rank, step, backward, no_sync):
    output = model(share(rank, step))
    backward(loss_of(output.logits if isinstance(output, Result) else output["a"][0][0]))


class Checkpointed(nn.Module):
    """Some layers are computed again in the backward pass."""

    def __init__(self, layers, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(net(6, 6) for _ in range(4))
        self.layers, self.reentrant = layers, reentrant

    def forward(self, x):
        x.requires_grad_()
        for i, block in enumerate(self.blocks):
            again = i in self.layers
            x = checkpoint(block, x, use_reentrant=self.reentrant) if again else block(x)
            x = x.tanh() if i < 3 else x
        return x


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
    "outputs in a tree": (partial(Outputs, False), with_outputs),
    "outputs in a class": (partial(Outputs, True), with_outputs),
    "checkpoint of some layers": (partial(Checkpointed, [1, 2], False), plainly),
    "reentrant checkpoint of all layers": (partial(Checkpointed, [0, 1, 2, 3], True), plainly),
}


@pytest.mark.parametrize("bucket_cap_mb", [TINY, 25])
def test_any_model_has_the_gradients_of_one_process(pools, bucket_cap_mb):
    for name, case in MODELS.items():
        assert pools(2)(compare, *case, bucket_cap_mb=bucket_cap_mb) == [None] * 2, name


# ---- construction -----------------------------------------------------------------------------


class Buffers(nn.Module):
    """Buffers of all dtypes and layouts, other values on each rank."""

    def __init__(self, rank):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 2), rank + 1.0).t())
        for i, dtype in enumerate(DTYPES):
            tensor = (torch.arange(6).view(2, 3) * (rank + 1) % 5).to(dtype)
            self.register_buffer(f"plain{i}", tensor)
            self.register_buffer(f"turned{i}", tensor.t().contiguous().t())
            self.register_buffer(f"scalar{i}", tensor[1, 1].clone())
            self.register_buffer(f"empty{i}", tensor[:0])


DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16]
DTYPES += [torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint32]


def test_every_rank_takes_what_rank_0_has(pools):
    def differ():
        module, theirs = Buffers(dist.get_rank()), Buffers(0).state_dict()
        layout = [tensor.stride() for tensor in module.state_dict().values()]
        OURS(module)
        state = module.state_dict()
        assert [tensor.stride() for tensor in state.values()] == layout
        return [k for k in state if state[k].tolist() != theirs[k].tolist()]

    assert pools(3)(differ) == [[]] * 3


DIFFERENCES = {
    "shape": (
        lambda m: setattr(m, "0", nn.Linear(4, 2)),
        "rank 0: parameter 0.weight, shape (2, 3), float32\n"
        "  rank 1: parameter 0.weight, shape (2, 4), float32",
    ),
    "dtype": (lambda m: m.double(), "rank 1: parameter 0.weight, shape (2, 3), float64"),
    "one less": (
        lambda m: setattr(m, "1", nn.BatchNorm1d(2, affine=False)),
        "rank 0: parameter 1.weight, shape (2,), float32\n  rank 1: buffer 1.running_mean",
    ),
    "frozen": (
        lambda m: m[1].bias.requires_grad_(False),
        "rank 0: parameter 1.bias, shape (2,), float32\n"
        "  rank 1: parameter 1.bias, shape (2,), float32, frozen",
    ),
    "layout": (
        lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(3, 2).t())),
        "rank 0: parameter 0.weight, shape (2, 3), float32\n"
        "  rank 1: parameter 0.weight, shape (2, 3), float32, strides (1, 2)",
    ),
}


def test_different_models_are_refused_on_every_rank(pools):
    def wrap(change):
        module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        if dist.get_rank() == 1:
            change(module)
        with pytest.raises(ValueError) as why:
            OURS(module)
        return str(why.value)

    first = "the ranks have different models. The first difference:\n  rank 0: "
    for what, (change, words) in DIFFERENCES.items():
        for told in pools(3)(wrap, change):
            assert told.startswith(first) and words in told and "rank 2" not in told, what


def test_what_cannot_be_wrapped(pools):
    with pytest.raises(RuntimeError, match="md.ranks or md.launch; or call .*init_process_group"):
        OURS(nn.Linear(2, 2))

    def refuse():
        nothing = "^DistributedDataParallel: the module has no parameter to train"
        for module in nn.ReLU(), nn.Linear(2, 2).requires_grad_(False):
            with pytest.raises(ValueError, match=nothing):
                OURS(module)
        with pytest.raises(ValueError, match="^bucket_cap_mb must be more than 0, not 0"):
            OURS(nn.Linear(2, 2), bucket_cap_mb=0)
        group = dist.new_group([0])
        if dist.get_rank() == 1:
            with pytest.raises(ValueError, match="rank 1 is not in the process group it was given"):
                OURS(nn.Linear(2, 2), process_group=group)

    pools(2)(refuse)


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


# ---- buckets ----------------------------------------------------------------------------------


def parameters(*sizes, dtype=torch.float32):
    return [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in sizes]


def positions(plan, of):
    numbers = {parameter: i for i, parameter in enumerate(of)}
    return [[numbers[parameter] for parameter in bucket] for bucket in plan]


def test_torch_has_the_same_buckets():
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(1, [50, 2**18, 2**20][seed % 3], (12,), generator=generator).tolist()
        ps = parameters(*sizes)
        for cap in 100, 2**20, 3 * 2**20, 25 * 2**20:
            theirs, _ = dist._compute_bucket_assignment_by_size(ps, [min(2**20, cap), cap])
            assert positions(assign(ps, cap), ps) == theirs, (seed, cap)
    ps = parameters(4, 4, 4) + parameters(2, 2, 2, dtype=torch.float64) + parameters(4, 4)
    ps = [ps[i] for i in (0, 3, 1, 4, 2, 5, 6, 7)]  # two dtypes, one after the other
    assert positions(assign(ps, 32), ps) == [[0, 2], [1, 3], [5], [4, 6], [7]]


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
    def run():
        rank, _ = here()
        torch.manual_seed(0)
        module = Backwards(turned=rank == 1)
        plain = copy.deepcopy(module)
        ddp, orders = OURS(module, bucket_cap_mb=200 / 2**20), []
        sent = recorder(ddp)
        for step in range(4):
            loss_of(ddp(share(rank, step)), step).backward()
            one_process(plain, plainly, step)  # gradients add up
            orders.append([bucket[0].split(".")[0] for bucket in sent])
            sent.clear()
        return orders, apart(module, plain)

    found, anew = ["b", "first", "a", "last"], ["last", "b", "a", "first"]
    assert pools(3)(run) == [([found, anew, anew, anew], [])] * 3


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


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (net(6, 3) for _ in range(4))

    def forward(self, x, use):
        return sum(getattr(self, name)(x) for name in use)


USES = {  # by step and rank
    "on all ranks": [("abd", "abd", "abd")] * 3,
    "other ones on each": [("a", "ab", "c")] * 3,
    "other ones at each step": [("ab", "ab", "c"), ("a", "a", "a"), ("abc", "b", "d")],
}


@pytest.mark.parametrize("no_sync", [False, True])
def test_parameters_may_be_left_without_gradient(pools, no_sync):
    """As torch has it, and as one process that takes all ranks' examples."""

    def train(used):
        rank, size = here()
        models = [Branches() for _ in range(3)]
        options = {"find_unused_parameters": True, "bucket_cap_mb": TINY}
        same = {"static_graph": True, "bucket_cap_mb": TINY}
        ours = OURS(models[0], **(same if no_sync else options))
        models[:2] = ours, TorchDDP(models[1], **options)
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in models]
        for step, uses in enumerate(used):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                alone = model is models[2]
                for r in range(size) if alone else [rank]:
                    if no_sync:  # the ranks use a branch more, each another one
                        with getattr(model, "no_sync", contextlib.nullcontext)():
                            loss = loss_of(model(share(r, step), "dca"[r]))
                            (loss / size if alone else loss).backward()
                    loss = loss_of(model(share(r, step), uses[r]))
                    (loss / size if alone else loss).backward()
                optimizer.step()
            for model, optimizer in zip(models[:2], optimizers, strict=False):
                if found := apart(model.module, models[2]):
                    return f"{type(model).__module__}, step {step}: {found}"
                if len(optimizer.state) != len(optimizers[2].state):
                    return f"{type(model).__module__}, step {step}: states"
        return None

    for name, used in USES.items():
        assert pools(3)(train, used) == [None] * 3, name


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
    "bfloat16": (lambda: None, renamed(default_hooks.bf16_compress_hook)),
    "torch's float16": (lambda: None, default_hooks.fp16_compress_hook),
    "PowerSGD": (power, powerSGD_hook.powerSGD_hook),
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


def test_hooks_do_in_ours_what_they_do_in_torchs(pools):
    exact = pools(3)(trained_with, TorchDDP, "none")
    for hook in HOOKS:
        ours, theirs = (pools(3)(trained_with, wrap, hook) for wrap in (OURS, TorchDDP))
        for of_ranks in (ours, theirs):
            assert all(torch.equal(of_ranks[0], other) for other in of_ranks), hook
        rough = hook not in ("none", "torch's mean")  # then sums in another order differ more
        assert torch.allclose(ours[0], theirs[0], rtol=1e-5, atol=2e-3 if rough else 1e-6), hook
        assert torch.allclose(ours[0], exact[0], rtol=1e-5, atol=1e-6) != rough, hook
        assert torch.allclose(ours[0], exact[0], atol=1 if "Power" in hook else 0.01), hook


def test_what_is_wrong_with_a_hook_surfaces(pools):
    def wrong_future(_, bucket):
        future = torch.futures.Future()
        future.set_exception(ValueError("of the future"))
        return future

    def raises(_, bucket):
        raise KeyError("of the hook")

    def run():
        for hook, kind in (wrong_future, ValueError), (raises, KeyError):
            ddp = OURS(net(), bucket_cap_mb=TINY)
            ddp.register_comm_hook(None, hook)
            with pytest.raises(kind, match="of the"):
                loss_of(ddp(share(dist.get_rank()))).backward()

    pools(2)(run)


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


def test_two_forward_passes_of_batch_norm_before_a_backward_pass(pools):
    """Between them, rank 0's means arrive where autograd has kept the first ones."""

    def twice():
        rank, _ = here()
        module, plain = md.zoo.convnet().double(), md.zoo.convnet().double()
        ddp, (images, _) = OURS(module), md.zoo.digits(torch.float64)
        (loss_of(ddp(images[rank:40:2])) + loss_of(ddp(images[40 + rank : 80 : 2]))).backward()
        for r in range(2):
            loss = loss_of(plain(images[r:40:2])) + loss_of(plain(images[40 + r : 80 : 2]))
            (loss / 2).backward()
        return [words for words in apart(module, plain) if "grad" in words]

    assert pools(2)(twice) == [[], []]


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
    ddp = OURS(model, bucket_cap_mb=TINY)
    loss_of(ddp(share(rank), "abcd")).backward()
    if wrong_rank not in (None, rank):
        loss_of(ddp(share(rank), "abcd")).backward()
    elif which == "unused":
        loss_of(ddp(share(rank), "ad")).backward()
    elif which == "frozen":
        model.b.requires_grad_(False)
        loss_of(ddp(share(rank), "abcd")).backward()
    elif which == "dtype":
        model.float()
        ddp(share(rank).float(), "abcd")
    elif which == "create_graph":
        loss_of(ddp(share(rank), "abcd")).backward(create_graph=True)
    elif which == "sparse":
        OURS(nn.Embedding(3, 2, sparse=True))(torch.tensor([rank])).sum().backward()


NO_GRADIENT = "this backward pass gave no gradient to {}, for which the other ranks wait. Was"
WRONG = {
    "unused": NO_GRADIENT.format("b.0.weight, b.0.bias, c.0.weight, c.0.bias"),
    "frozen": NO_GRADIENT.format("b.0.weight, b.0.bias"),
    "dtype": "parameter a.0.weight was added, replaced, unfrozen or converted since its model was",
    "create_graph": "gradients of gradients are not averaged: create_graph=True",
}


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_a_pass_that_cannot_be_averaged_names_the_rank_and_why(pools, monkeypatch):
    for which, words in WRONG.items():
        error = blamed(pools(2), unfinished, which, 1)
        assert error.rank == 1 and f"rank 1 raised RuntimeError: {words}" in str(error), which
    monkeypatch.setattr("minidist.runtime.processes.GRACE", 20)  # each has an error of its own
    error = blamed(pools(2), unfinished, "unused", None)
    assert str(error).startswith(f"every rank raised RuntimeError: {WRONG['unused']}")
    error = blamed(pools(2), unfinished, "sparse", None)
    assert "every rank raised" in str(error)


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
def test_ranks_may_have_different_numbers_of_batches(pools, divide):
    for counts, unused, no_sync in (
        ((4, 6, 5), False, False),
        ((0, 3, 2), False, False),  # rank 0 is out before the buckets are made anew
        ((5, 1, 0), True, False),
        ((6, 9, 3), False, True),
    ):
        arguments = counts, divide, unused, no_sync
        ours = pools(3)(train_unevenly, OURS, *arguments)
        if unused:  # in torch's join it has a gradient of zeros, which moves a momentum
            theirs = alone(counts, divide)
        else:
            theirs = pools(3)(train_unevenly, TorchDDP, *arguments)[0]
        assert ours == [ours[0]] * 3, arguments
        for found, expected in zip(ours[0], theirs, strict=True):
            for name in expected:
                # As long as it has batches, rank 0's means are everyone's. In torch the last's.
                if "running" not in name:
                    a, b = (torch.tensor(state[name]).double() for state in (found, expected))
                    assert md.parity.relative_difference(a, b) < 1e-6, (arguments, name)


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


@pytest.mark.soak
@pytest.mark.timeout(260)
def test_a_script_trains_under_python_and_under_torchrun(start, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = "--standalone", "--nproc-per-node=2"
    runs = [start("script.py", python=True), start(*torchrun, "script.py")]
    assert [run.finish() for run in runs] == [0, 0], [run.printed() for run in runs]
    alone, under = (run.printed() for run in runs)
    assert alone.count("\n") == 1 and under == alone


@pytest.mark.gpu(2)
@pytest.mark.parametrize("hook", ["none", "bfloat16"])
def test_ranks_with_a_gpu_each_train_as_one_process_does(hook):
    def strategy(module):
        ddp = OURS(module, bucket_cap_mb=0.002)
        if hook == "bfloat16":
            ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
        return ddp

    with md.ranks(2, backend="cpu:gloo,cuda:nccl", timeout=120) as ranks:
        for model in (md.parity.digits_mlp, md.zoo.convnet):
            md.parity.check(
                strategy,
                model=model,
                ranks=ranks,
                tolerance=0.05 if hook == "bfloat16" else None,
            )
