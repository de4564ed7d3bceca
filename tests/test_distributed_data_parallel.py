"""Ranks that average their gradients train as one process does, whatever the model and the loop
look like; buckets leave while backward computes; and a pass that cannot be averaged is named.
Lesson: distributed_data_parallel."""

import contextlib
import copy
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist.instruments.parity.differences import differences

OURS = md.DistributedDataParallel
TINY = 1e-4  # MiB: a bucket of some 13 float64 parameters, so that models of a few have several


def share(rank, step=0, n=5, width=6):
    """Examples of a rank, other ones on each rank and at each step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(n, width, dtype=torch.float64, generator=generator)


def net(*sizes, dtype=torch.float64):
    return md.zoo.mlp(*(sizes or (6, 5, 4, 3)), dtype=dtype)


def loss_of(output, step=0):
    """A loss that weighs every element differently."""
    weights = torch.arange(1, output.numel() + 1, dtype=output.dtype).view(output.shape) + step
    return (output * weights).sum() / output.numel()


def apart(ours, plain, allowed=1e-12):
    """What differs between two models: parameters, gradients, buffers."""
    states = [dict(model.state_dict()) for model in (ours, plain)]
    for model, state in zip((ours, plain), states, strict=True):
        named = model.named_parameters()
        state |= {f"{name}.grad": p.grad for name, p in named if p.grad is not None}
    return [words for words, difference in differences(*states) if not difference <= allowed]


@dataclass
class Pass:
    """What a loop does with a model in a step: on a rank, or in one process for each rank."""

    model: nn.Module
    rank: int
    step: int
    ranks: int = 1  # in one process: a loss counts as one of so many

    def x(self, i=0):
        return share(self.rank, self.step + 10 * i)

    def loss(self, i=0):
        return loss_of(self.model(self.x(i)), self.step + i)

    def backward(self, loss, **options):
        (loss / self.ranks).backward(**options)

    def no_sync(self):
        return self.model.no_sync() if isinstance(self.model, OURS) else contextlib.nullcontext()


def one_process(plain, way, step):
    """Go `way` for every rank, and take the mean."""
    for rank in range(dist.get_world_size()):
        way(Pass(plain, rank, step, dist.get_world_size()))


def compare(make, way, allowed=1e-12, **options):
    """On a rank: train by ours and in one process, and return the first difference."""
    torch.manual_seed(0)
    module = make()
    plain, ddp = copy.deepcopy(module), OURS(module, **options)
    for step in range(3):
        way(Pass(ddp, dist.get_rank(), step))
        one_process(plain, way, step)
        if found := apart(module, plain, allowed):
            return f"step {step}: {found}"
        for model in module, plain:
            torch.optim.SGD(model.parameters(), lr=0.05).step()
            model.zero_grad()
    return None


# ---- the loop ---------------------------------------------------------------------------------


def plainly(run):
    run.backward(run.loss())


def accumulate(run):
    with run.no_sync():
        run.backward(run.loss(1))
        run.backward(run.loss(2))
    run.backward(run.loss())


def several_backward_passes(run):
    for i in range(3):
        run.backward(run.loss(i))


def forward_passes_first(run):
    for loss in [run.loss(i) for i in range(3)]:
        run.backward(loss)


def one_backward_pass_for_several(run):
    run.backward(sum(run.loss(i) for i in range(3)))


def evaluation_between(run):
    loss = run.loss()
    with torch.no_grad():
        run.model.eval()(run.x(1))
    run.model.train()
    run.backward(loss)


def adversarial_inputs(run):
    x = run.x().requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(run.model(x)), x)
    with run.no_sync():
        run.backward(run.loss(1))
    run.backward(loss_of(run.model(x.detach() + 0.1 * slope.sign())))


def gradient_penalty(run):
    x = run.x().requires_grad_()
    output = run.model(x)
    (slope,) = torch.autograd.grad(loss_of(output), x, create_graph=True)
    run.backward(loss_of(output) + slope.pow(2).sum())


def penalty_of_the_bare_module(run):
    weights = getattr(run.model, "module", run.model).parameters()
    run.backward(run.loss() + sum(weight.pow(2).sum() for weight in weights))


LOOPS = [
    *(accumulate, several_backward_passes, forward_passes_first, one_backward_pass_for_several),
    *(evaluation_between, adversarial_inputs, gradient_penalty, penalty_of_the_bare_module),
]


def smooth(last_bias=True):
    last = nn.Linear(4, 3, bias=last_bias)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), last).double()


@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_any_loop_gives_the_gradients_of_one_process(pools, find_unused_parameters):
    options = {"find_unused_parameters": find_unused_parameters, "bucket_cap_mb": TINY}
    for loop in LOOPS:
        run = partial(compare, smooth, loop, **options)
        assert pools(3)(run) == [None] * 3, loop


# ---- the model --------------------------------------------------------------------------------


class Layouts(nn.Module):
    """Parameters that are transposed, channels last, a number, and empty."""

    def __init__(self):
        super().__init__()
        image = torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last)
        made = [torch.randn(3, 6).t(), image, torch.tensor(1.5), torch.empty(0, 3)]
        self.all = nn.ParameterList(tensor.double() for tensor in made)

    def forward(self, x):
        turned, image, number, empty = self.all
        return (x @ turned).sum() * image.pow(2) * number + empty.sum()


class Mixed(nn.Module):
    """Parameters of three dtypes."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = net(6, 4), net(4, 4, dtype=torch.float32), net(4, 3)
        self.short = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16))

    def forward(self, x):
        return self.c(self.b(self.a(x).float()).double()) * self.short


@dataclass
class Output:
    """Nothing that torch's pytree knows."""

    logits: torch.Tensor


class Outputs(nn.Linear):
    """In a tree, or in a class."""

    def __init__(self, kind):
        super().__init__(6, 4, dtype=torch.float64)
        self.kind = kind

    def forward(self, x):
        return self.kind(logits=super().forward(x))


def with_outputs(run):
    output = run.model(run.x())
    run.backward(loss_of(output["logits"] if isinstance(output, dict) else output.logits))


def of_forces(run):
    """Its backward pass comes through no output of the wrapper."""
    x = run.x().requires_grad_()
    (force,) = torch.autograd.grad(run.model(x).sum(), x, create_graph=True)
    run.backward(force.pow(2).mean())


class Checkpointed(nn.Module):
    """Some layers are computed again in the backward pass."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.middle, self.last = net(6, 6), smooth(), net(3, 3)
        self.reentrant = reentrant

    def forward(self, x):
        x = checkpoint(self.middle, self.first(x), use_reentrant=self.reentrant)
        return self.last(x.tanh())


def frozen(i):
    model = net()
    model[i].requires_grad_(False)
    return model


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = net(6, 6), net(6, 6)
        self.second[0].weight = self.first[0].weight

    def forward(self, x):
        return self.first(self.second(self.first(x)))


MODELS = {  # and what may differ
    "layouts": (Layouts, plainly),
    "dtypes": (Mixed, plainly, 0.02),
    "frozen": (partial(frozen, 0), plainly),
    "tied": (Tied, accumulate),
    "outputs in a tree": (partial(Outputs, dict), with_outputs),
    "outputs in a class": (partial(Outputs, Output), with_outputs),
    "forces": (partial(smooth, last_bias=False), of_forces),
    "checkpoint": (partial(Checkpointed, False), plainly),
    "reentrant checkpoint": (partial(Checkpointed, True), plainly),
}


def test_any_model_has_the_gradients_of_one_process(pools):
    for name, case in MODELS.items():
        assert pools(2)(compare, *case, bucket_cap_mb=TINY) == [None] * 2, name


# ---- construction -----------------------------------------------------------------------------


DTYPES = [torch.bool, torch.int64, torch.bfloat16, torch.float64, torch.complex64]


def buffers(rank):
    """Of several dtypes and layouts, other values on each rank."""
    module = nn.Linear(2, 3)  # drawn at random
    for i, dtype in enumerate(DTYPES):
        tensor = (torch.arange(6).view(2, 3) * (rank + 1) % 5).to(dtype)
        module.register_buffer(f"plain{i}", tensor)
        module.register_buffer(f"turned{i}", tensor.t().contiguous().t())
        module.register_buffer(f"scalar{i}", tensor[1, 1].clone())
    return module


def test_every_rank_takes_what_rank_0_has(pools):
    def differ():
        torch.manual_seed(dist.get_rank())
        module = buffers(dist.get_rank())
        OURS(module)
        torch.manual_seed(0)
        theirs = buffers(0).state_dict()
        return [k for k, v in module.state_dict().items() if not torch.equal(v, theirs[k])]

    assert pools(3)(differ) == [[]] * 3


DIFFERENCES = {
    "shape": (lambda m: setattr(m, "0", nn.Linear(4, 2)), "0.weight, shape (2, 4), float32"),
    "one less": (lambda m: setattr(m, "1", nn.Identity()), "has no more parameters or buffers"),
    "frozen": (lambda m: m[1].bias.requires_grad_(False), "1.bias, shape (2,), float32, frozen"),
}


def test_different_models_are_refused_on_every_rank(pools):
    def wrap(change):
        module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        if dist.get_rank() == 1:
            change(module)
        with pytest.raises(ValueError, match="^the ranks have different models") as why:
            OURS(module)
        return str(why.value)

    for what, (change, words) in DIFFERENCES.items():
        for told in pools(3)(wrap, change):
            assert "rank 0: " in told and told.endswith(words) and "rank 2" not in told, what


def test_what_cannot_be_wrapped(pools):
    with pytest.raises(RuntimeError, match=r"md.ranks or md.launch; or call .*init_process_group"):
        OURS(nn.Linear(2, 2))

    def refuse():
        with pytest.raises(ValueError, match="has no parameter to train"):
            OURS(nn.Linear(2, 2).requires_grad_(False))
        with pytest.raises(ValueError, match="a rank has one device"):
            OURS(nn.Linear(2, 2), [0, 1])

    pools(2)(refuse)


def test_a_group_trains_among_its_members(pools):
    def train():
        rank = dist.get_rank()
        group = dist.new_group([2, 0])
        if rank == 1:
            return []
        ddp, plain = OURS(net(), process_group=group, bucket_cap_mb=TINY), net()
        for r in (0, 2):
            plainly(Pass(plain, r, 0, ranks=2))
        plainly(Pass(ddp, rank, 0))
        return apart(ddp.module, plain)

    assert pools(3)(train) == [[]] * 3


# ---- overlap, order and bytes -----------------------------------------------------------------


def test_the_first_bucket_leaves_before_the_last_gradient_exists(pools):
    def record():
        module, events = net(6, 6, 6, 6), []
        for name, p in module.named_parameters():
            p.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name[0]))
        ddp = OURS(module, bucket_cap_mb=TINY)
        send, dist.all_reduce = dist.all_reduce, lambda *a, **k: events.append("*") or send(*a, **k)
        try:
            plainly(Pass(ddp, dist.get_rank(), 0))
        finally:
            dist.all_reduce = send
        return "".join(events)  # of layers 4, 2 and 0 a weight and a bias

    assert pools(2)(record) == ["44*22*00*"] * 2


class Backwards(nn.Module):
    """Uses its layers in another order than it names them; rank 1 uses two in turn."""

    def __init__(self):
        super().__init__()
        self.last, self.a, self.first, self.b = (nn.Linear(6, 6).double() for _ in range(4))

    def forward(self, x):
        x = self.first(x).tanh()
        x = self.b(x) + self.a(x) if dist.get_rank() == 1 else self.a(x) + self.b(x)
        return self.last(x)


def test_buckets_are_made_anew_in_the_order_of_arrival_on_rank_0(pools):
    def run():
        torch.manual_seed(0)
        module = Backwards()
        plain = copy.deepcopy(module)
        names, sent = {p: name[0] for name, p in module.named_parameters()}, []

        def hook(_, bucket: dist.GradBucket):
            sent.append(names[bucket.parameters()[0]])
            return default_hooks.allreduce_hook(None, bucket)

        ddp = OURS(module, bucket_cap_mb=200 / 2**20)
        ddp.register_comm_hook(None, hook)
        for step in range(3):
            plainly(Pass(ddp, dist.get_rank(), step))
            one_process(plain, plainly, step)  # gradients add up
        first_of_each = "".join(names[0][0] for names in ddp.bucket_names())
        return "".join(sent), first_of_each, apart(module, plain)

    assert pools(3)(run) == [("bfallbaflbaf", "lbaf", [])] * 3


def test_the_bytes_are_those_of_the_gradients(pools):
    def count(bucket_cap_mb, **options):
        module = md.zoo.convnet().double()
        ddp, calls = OURS(module, bucket_cap_mb=bucket_cap_mb, **options), []
        for step in range(3):
            with md.measure.TrafficCounter() as traffic:
                loss_of(ddp(share(dist.get_rank(), step, 5, 64))).backward()
            calls.append(traffic.calls)
        with ddp.no_sync():
            ddp(share(0, 0, 5, 64))  # takes rank 0's buffers
            with md.measure.TrafficCounter() as traffic:
                loss_of(ddp(share(dist.get_rank(), 0, 5, 64))).backward()
        return [*calls, traffic.calls]

    total = 8 * sum(p.numel() for p in md.zoo.convnet().parameters())
    buffers = 8 * (8 + 8 + 1)
    for calls in pools(2)(count, 25):
        assert calls == [
            {"all_reduce": (1, total), "broadcast": (1, buffers)},
            {"all_reduce": (1, total), "broadcast": (2, 5 * 8 + buffers)},  # and their order, once
            {"all_reduce": (1, total), "broadcast": (1, buffers)},
            {},
        ]
    for calls in pools(2)(count, 1e-9, broadcast_buffers=False, find_unused_parameters=True):
        assert calls == [*[{"all_reduce": (6, total + 5)}] * 3, {}]


# ---- passes that cannot be averaged -----------------------------------------------------------


class Skipping(nn.Sequential):
    def forward(self, x, skip=False):
        return self[2](self[0](x) if skip else self[1](self[0](x)))


NO_GRADIENT = r"this backward pass gave no gradient to 1\.0\.weight, 1\.0\.bias"


def unfinished(rank=None):
    """A pass that skips a layer, on one rank or on all; and what is wrong with the next one."""
    module = Skipping(net(6, 6), net(6, 6), net(6, 6))
    plain = copy.deepcopy(module)
    ddp = OURS(module, bucket_cap_mb=TINY)
    skipping = loss_of(ddp(share(0), skip=rank in (None, dist.get_rank())))
    if rank is not None:
        skipping.backward()
    with pytest.raises(RuntimeError, match=NO_GRADIENT):
        skipping.backward()
    module.zero_grad()
    plainly(Pass(ddp, dist.get_rank(), 0))
    one_process(plain, plainly, 0)
    return apart(module, plain)


def test_a_parameter_without_gradient_is_named(pools):
    assert pools(2)(unfinished) == [[], []]
    with pytest.raises(md.RankError, match=NO_GRADIENT) as why:
        pools(2)(unfinished, 1)  # rank 0 waits for it
    assert why.value.rank == 1


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_gradients_of_gradients_are_refused(pools):
    def run():
        ddp = OURS(net())
        with pytest.raises(RuntimeError, match="gradients of gradients are not averaged"):
            loss_of(ddp(share(dist.get_rank()))).backward(create_graph=True)

    pools(2)(run)


# ---- on GPUs ----------------------------------------------------------------------------------


@pytest.mark.gpu(2)
def test_ranks_with_a_gpu_each_train_as_one_process_does():
    with md.ranks(2, backend="cpu:gloo,cuda:nccl", timeout=120) as ranks:
        for model in (md.parity.digits_mlp, md.zoo.convnet):
            md.parity.check(partial(OURS, bucket_cap_mb=0.002), model=model, ranks=ranks)
