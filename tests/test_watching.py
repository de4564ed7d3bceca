"""`md.watch`: it finds what one process would have done otherwise, and is silent where nothing is.

The bugs of published systems are in the museum, and test_museum.py watches them.
"""

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from programs import few
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

import minidist as md
from minidist.fully_sharded import by_class
from minidist.instruments.watching import SilentError
from minidist.instruments.watching.mixture import seen_by
from minidist.instruments.watching.naive import mixture

# ---- right runs of every strategy ---------------------------------------------------------------

OPTIMIZERS = {
    "SGD": (SGD, {"lr": 0.1}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (Adam, {"lr": 1e-3, "weight_decay": 0.1}),
    "AdamW": (AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
}


def transformer(dtype=torch.float64):
    return md.zoo.Transformer(width=32, heads=4, layers=2, length=16).to(dtype)


def cross_entropy(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def loss_sum(model, batch):
    inputs, targets = batch
    outputs = model(inputs).flatten(0, -2)
    return F.cross_entropy(outputs, targets.flatten(), reduction="sum"), targets.numel()


def optimizer_of(model, name):
    kind, options = OPTIMIZERS[name]
    return kind(model.parameters(), **options)


def zero(kind, wrap):
    def make(module, name):
        optimizer, options = OPTIMIZERS[name]
        states = kind(module.parameters(), optimizer, **options)
        return (wrap(module, states) if wrap is md.ShardedDataParallel else wrap(module)), states

    return make


def torch_zero(module, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it imports is deprecated
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return zero(ZeroRedundancyOptimizer, DistributedDataParallel)(module, name)


def wrapped(wrap):
    def make(module, name):
        model = wrap(module)
        return model, optimizer_of(model, name)

    return make


def sharded(shard):
    def wrap(module):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in module.blocks:
            shard(block, mesh=mesh)
        shard(module, mesh=mesh)
        return module

    return wrapped(wrap)


def hybrid(module):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    return md.FullyShardedDataParallel(module, device_mesh=mesh)


def each_own(model, optimizer, micro_batches, clip):
    """A step of data parallelism."""
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        (cross_entropy(model(inputs), targets) / len(micro_batches)).backward()
    if clip and hasattr(model, "clip_grad_norm_"):
        model.clip_grad_norm_(clip)
    elif clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def shared(model, optimizer, micro_batches, clip):
    """A step of ranks that share a batch."""
    optimizer.zero_grad()
    ((inputs, targets),) = micro_batches
    model.train_step(inputs, targets, getattr(model, "cross_entropy", cross_entropy))
    if clip:
        model.clip_grad_norm_(clip)
    optimizer.step()


def by_vocabulary(model, optimizer, micro_batches, clip):
    """A step of tensor parallelism."""
    optimizer.zero_grad()
    ((inputs, targets),) = micro_batches
    md.vocab_parallel_cross_entropy(model(inputs), targets).backward()
    optimizer.step()


# How it is made, how a step is made, the ranks with a batch of their own, of how many.
STRATEGIES = {
    "ddp": (wrapped(md.DistributedDataParallel), each_own, (0, 1), 2),
    "torch's ddp": (wrapped(DistributedDataParallel), each_own, (0, 1), 2),
    "zero 1": (zero(md.ZeroRedundancyOptimizer, md.DistributedDataParallel), each_own, (0, 1), 2),
    "zero 2": (zero(md.ZeroRedundancyOptimizer, md.ShardedDataParallel), each_own, (0, 1), 2),
    "torch's zero": (torch_zero, each_own, (0, 1), 2),
    "fsdp": (
        wrapped(lambda m: md.FullyShardedDataParallel(m, auto_wrap_policy=by_class(md.zoo.Block))),
        *(each_own, (0, 1), 2),
    ),
    "fully_shard": (sharded(md.fully_shard), each_own, (0, 1), 2),
    "torch's fully_shard": (sharded(torch_fully_shard), each_own, (0, 1), 2),
    "torch's fsdp": (
        wrapped(lambda m: TorchFSDP(m, device_id=torch.device("cpu"), use_orig_params=True)),
        *(each_own, (0, 1), 2),
    ),
    "hybrid": (wrapped(hybrid), each_own, (0, 1, 2, 3), 4),
    "tensor": (
        wrapped(lambda m: md.tensor_parallel.parallelize_module(m, None, None)),
        *(by_vocabulary, (0,), 2),
    ),
    "pipeline": (
        wrapped(lambda m: md.Pipeline(m.sequential(), microbatches=4)),
        *(shared, (0,), 2),
    ),
    "mixed": (
        wrapped(lambda m: md.mixed.MixedParallel(m, md.mixed.mesh(2, 1, 2), microbatches=2)),
        *(shared, (0, 2), 4),
    ),
}


def train(strategy, optimizer, clip=None, dtype=torch.float64, fault=0.0, steps=3):
    """What the watch says of a training; the noise that it has seen if it says nothing."""
    make, step, sources, world_size = STRATEGIES[strategy]
    model, states = make(transformer(dtype), optimizer)
    bare = (lambda: transformer(dtype).sequential()) if strategy == "pipeline" else transformer
    watch = md.watch(
        *(model, states),
        bare=lambda: bare().to(dtype),
        loss=loss_sum,
        clip=clip,
        sources=sources,
    )
    if fault and dist.get_rank() == world_size - 1:

        def wrong(*_):
            next(p.grad for p in model.parameters() if p.grad is not None).mul_(1 + fault)

        states.register_step_pre_hook(wrong)
    mine = max(i for i, rank in enumerate(sources) if rank <= dist.get_rank())
    inputs, targets = (each.clone() for each in md.zoo.text(16))
    count = 8 * len(sources)
    for number in range(steps):
        rows = torch.arange(number * count, number * count + count)[mine :: len(sources)]
        parts = rows.chunk(2 if step is each_own else 1)
        batches = [(inputs[part], targets[part]) for part in parts]
        try:
            with watch(batches):
                step(model, states, batches, clip)
        except SilentError as error:
            return str(error)
    return watch.noise


# Plain SGD leaves the difference of two weights, which has lost digits; Adam a sum with the decay.
NOISE = {"SGD": 1e-10, "momentum": 1e-14, "Adam": 1e-12, "AdamW": 1e-14}
CASES = [(strategy, "AdamW") for strategy in STRATEGIES] + [
    pytest.param(strategy, name, marks=() if strategy == "ddp" else pytest.mark.soak)
    for strategy in STRATEGIES
    for name in ("SGD", "momentum", "Adam")
]


@pytest.mark.parametrize(("strategy", "optimizer"), CASES)
def test_a_right_run_is_silent(pools, strategy, optimizer):
    clips = strategy not in ("tensor", "torch's fsdp")  # FSDP1 clips no float64
    found = pools(STRATEGIES[strategy][3])(train, strategy, optimizer, 0.3 if clips else None)
    assert found[0] <= NOISE[optimizer]  # a sentence is no number


@pytest.mark.parametrize("strategy", few(STRATEGIES, {"ddp", "fsdp", "tensor", "torch's fsdp"}))
def test_float32_is_silent(pools, strategy):
    clip = 0.3 if strategy != "tensor" else None
    found = pools(STRATEGIES[strategy][3])(train, strategy, "AdamW", clip, torch.float32)
    assert found[0] < 1e-2


@pytest.mark.parametrize(
    ("strategy", "optimizer"), [case for case in CASES if "torch's zero" not in str(case)]
)
def test_a_thousandth_in_one_rank_is_found(pools, strategy, optimizer):
    """Of torch's ZeRO the last rank need not own the parameter."""
    found = pools(STRATEGIES[strategy][3])(train, strategy, optimizer, fault=1e-3)
    assert len(set(found)) == 1  # all ranks say the same
    assert "step 1" in found[0]
    if strategy in ("fsdp", "fully_shard", "torch's fully_shard", "tensor"):
        assert "in the part of rank 1 are 1.001 times what they should be" in found[0]


# ---- what an ordinary loop does right -----------------------------------------------------------


def mlp(between=None):
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        layers = nn.Linear(64, 32), between or nn.ReLU(), nn.Linear(32, 10)
        return nn.Sequential(*layers).double()


def rows_of(step, rank):
    images, labels = md.zoo.digits(torch.float64)
    rows = slice(32 * step + rank, 32 * step + 32, 2)
    return images[rows], labels[rows]


def plain(model, optimizer, batch, context=None, through=None, after=None):
    optimizer.zero_grad()
    with context or nullcontext():
        cross_entropy((through or model)(batch[0]), batch[1]).backward()
    if after:
        after(model)
    optimizer.step()


def said(case, steps=3):
    """What the watch says of steps on two ranks. case: makes the model, its optimizer, a step, and
    options of the watch."""
    torch.manual_seed(dist.get_rank())
    model, optimizer, step, options = case()
    watch = md.watch(model, optimizer, **{"bare": mlp, "loss": loss_sum} | options)
    try:
        for number in range(steps):
            batch = rows_of(number, dist.get_rank())
            with watch([batch]):
                step(model, optimizer, batch)
    except SilentError as error:
        return str(error)
    return ""


def ddp(make=mlp, kind=Adam, step=plain, **options):
    model = DistributedDataParallel(make())
    return model, kind(model.parameters()), step, {"bare": make} | options


def dropout():
    return ddp(lambda: mlp(nn.Dropout(0.3)))


def batch_norm():
    return ddp(lambda: mlp(nn.BatchNorm1d(32).double()))


def batch_norm_in_float32():
    """A bias before it has a gradient that is zero but for rounding. Adam makes a step of it."""

    def rows(batch):  # 15: to divide by a power of two is exact
        return batch[0][:15].float(), batch[1][:15]

    def loss(model, batch):
        return loss_sum(model, rows(batch))

    def step(model, optimizer, batch):
        plain(model, optimizer, rows(batch))

    return ddp(lambda: mlp(nn.BatchNorm1d(32)).float(), step=step, loss=loss)


def frozen():
    def make():
        module = mlp()
        module[0].requires_grad_(False)
        return module

    return ddp(make)


def scheduled():
    model, optimizer, _, options = ddp()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def step(*given):
        plain(*given)
        scheduler.step()

    return model, optimizer, step, options


def two_groups(model):
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    return AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}])


def groups():
    """Of the learning rate, which is scheduled, the watch asks the loop's optimizer."""
    model = DistributedDataParallel(mlp())
    optimizer = two_groups(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)

    def step(*given):
        plain(*given)
        scheduler.step()

    return model, optimizer, step, {"make_optimizer": two_groups}


def another_optimizer():
    return ddp(kind=Adagrad)


def a_kin_of_adam():
    """It has momentum=0, and is no SGD."""
    return ddp(kind=RMSprop)


def an_adam_by_hand():
    """Its decay is decoupled, and no option says so."""

    class ByHand(torch.optim.Optimizer):
        def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1):
            super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

        @torch.no_grad()
        def step(self):
            (group,) = self.param_groups
            for p in group["params"]:
                state, (a, b) = self.state[p], group["betas"]
                m, v = (state.setdefault(k, torch.zeros_like(p)) for k in ("exp_avg", "exp_avg_sq"))
                m.lerp_(p.grad, 1 - a), v.lerp_(p.grad.square(), 1 - b)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * m / (v.sqrt() + 1e-8))

    return ddp(kind=ByHand)


def wrapped_optimizer():
    """As Accelerate's, which has no hooks of its own."""

    class Prepared(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer, self.step = optimizer, optimizer.step
            self.zero_grad = optimizer.zero_grad

    model, optimizer, step, options = ddp()
    return model, Prepared(optimizer), step, options


def weights_in_bfloat16():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    model = torch_fully_shard(mlp().float(), mesh=mesh, mp_policy=policy)

    def loss(model, batch):
        return loss_sum(model, (batch[0].float(), batch[1]))

    def step(model, optimizer, batch):
        plain(model, optimizer, (batch[0].float(), batch[1]))

    options = {"bare": lambda: mlp().float(), "loss": loss}
    return model, Adam(model.parameters()), step, options


def in_bfloat16(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(batch[0].float())
    return F.cross_entropy(outputs.float(), batch[1], reduction="sum"), len(batch[1])


def autocast_step(model, optimizer, batch):
    optimizer.zero_grad()
    total, count = in_bfloat16(model, batch)
    (total / count).backward()
    optimizer.step()


def autocast():
    return ddp(lambda: mlp().float(), step=autocast_step, loss=in_bfloat16)


RIGHT = [
    dropout,
    batch_norm,
    batch_norm_in_float32,
    frozen,
    scheduled,
    groups,
    another_optimizer,
    a_kin_of_adam,
    an_adam_by_hand,
    wrapped_optimizer,
    weights_in_bfloat16,
    autocast,
]


@pytest.mark.parametrize("case", RIGHT)
def test_an_ordinary_loop_is_silent(pools, case):
    assert pools(2)(said, case) == ["", ""]


# ---- what an ordinary loop does wrong -----------------------------------------------------------


def replaced():
    model, optimizer, step, options = ddp()
    model.module[2] = mlp()[2]
    return model, optimizer, step, options


def past_the_wrapper():
    return ddp(step=lambda *given: plain(*given, through=given[0].module))


def optimizer_first():
    module = mlp()
    optimizer, mesh = Adam(module.parameters()), init_device_mesh("cpu", (2,))
    return torch_fully_shard(module, mesh=mesh), optimizer, plain, {}


def never_averaged():
    return ddp(step=lambda *given: plain(*given, context=given[0].no_sync()))


def one_rank_skips():
    model = md.fully_shard(mlp())

    def step(model, optimizer, batch):
        cross_entropy(model(batch[0]), batch[1]).backward()
        if dist.get_rank() == 0:  # as a scaler that looks for inf in its own shards
            optimizer.step()

    return model, Adam(model.parameters()), step, {}


def clips_its_shards():
    def clip(model):
        norm = sum(p.grad.to_local().square().sum() for p in model.parameters()).sqrt()
        for p in model.parameters():
            p.grad.mul_((0.2 / norm).clamp(max=1))

    model = md.fully_shard(mlp())
    step = lambda *given: plain(*given, after=clip)  # noqa: E731
    return model, SGD(model.parameters(), lr=0.1), step, {"clip": 0.2}


def another_rate():
    model, optimizer, step, options = ddp()
    optimizer.param_groups[0]["lr"] *= 1 + dist.get_rank()
    return model, optimizer, step, options


def no_zero_grad():
    def step(model, optimizer, batch):
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return ddp(step=step)


def in_no_group():
    model = DistributedDataParallel(mlp())
    return model, Adam(model.module[2].parameters()), plain, {}


def cut_off():
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        outputs = model.module[2](model.module[:2](batch[0]).detach())
        cross_entropy(outputs, batch[1]).backward()
        for p in model.module[2].parameters():
            dist.all_reduce(p.grad)
            p.grad /= 2
        optimizer.step()

    return ddp(step=step)


def lost():
    """A gradient that is zero in the second step, where weights move by the first moment."""
    steps = iter(range(10))

    def lose(model):
        if next(steps) == 1:
            model.module[0].weight.grad.zero_()

    return ddp(step=lambda *given: plain(*given, after=lose))


def overwritten():
    def step(model, optimizer, batch):
        plain(model, optimizer, batch)
        with torch.no_grad():
            model.module[2].bias.zero_()

    return ddp(step=step)


def a_sum():
    def add(model):
        for p in model.parameters():
            p.grad.mul_(dist.get_world_size())

    return ddp(kind=SGD, step=lambda *given: plain(*given, after=add))


WRONG = {
    replaced: "no group of the optimizer has 2.weight, 2.bias",
    past_the_wrapper: "weigh rank 0: 1 for 0.5, rank 1: 0 for 0.5: was nothing averaged?",
    optimizer_first: "the optimizer has a parameter that is not the model's",
    never_averaged: "rank 1 has other values of 0.weight than rank 0",
    one_rank_skips: "the optimizers of the ranks took [1, 0] steps",
    clips_its_shards: "in the part of rank 1 are 1.",
    another_rate: "the optimizer of rank 1 has lr 0.002, that of rank 0 0.001",
    no_zero_grad: "step 2: the gradients of all parameters are no mixture",
    in_no_group: "no group of the optimizer has 0.weight, 0.bias",
    cut_off: "0.weight, 0.bias did not move",
    lost: "step 2: the gradients of 0.weight did not arrive",
    overwritten: "the gradients are right, the step is not: 2.bias moved otherwise",
    a_sum: "all parameters are 2 times what they should be: a sum where a mean should be?",
}


@pytest.mark.parametrize("case", WRONG)
def test_a_silent_fault_is_named(pools, case):
    words = pools(2)(said, case)
    assert WRONG[case] in words[0]
    assert words[0] == words[1]


# ---- between steps, and what it cannot look at --------------------------------------------------


def words_of(check, *given):
    try:
        check(*given)
    except SilentError as error:
        return str(error)
    return ""


def test_each_example_is_seen_once_and_in_another_order(pools):
    def run(epochs):
        model, optimizer, step, options = ddp()
        watch = md.watch(model, optimizer, loss=loss_sum, every=100, examples=96, **options)
        for order in epochs:
            for number in order:
                batch = rows_of(number, dist.get_rank())
                with watch([batch]):
                    step(model, optimizer, batch)
            found = words_of(watch.end_of_epoch)
        return found

    pool = pools(2)
    assert pool(run, [[0, 1, 2], [1, 0, 2]]) == ["", ""]
    assert "the order of an earlier one" in pool(run, [[0, 1, 2], [0, 1, 2]])[1]
    assert "32 of 96 examples were not seen" in pool(run, [[0, 1, 1]])[1]


def test_ranks_with_the_same_examples(pools):
    def run():
        model, optimizer, step, options = ddp()
        watch = md.watch(model, optimizer, loss=loss_sum, **options)
        with watch([rows_of(0, 0)]):
            step(model, optimizer, rows_of(0, 0))

    assert pools(2)(words_of, run)[0].startswith(
        "step 1: 16 of 32 examples of this step are on two"
    )


def test_buffers_count_before_an_evaluation(pools):
    def run():
        model, optimizer, step, options = batch_norm()
        watch = md.watch(model, optimizer, loss=loss_sum, **options)
        batch = rows_of(0, dist.get_rank())
        with watch([batch]):
            step(model, optimizer, batch)
        return words_of(watch.same)

    assert "rank 1 has other values of 1.running_mean than rank 0" in pools(2)(run)[0]


def test_it_looks_at_every_kth_step(pools):
    def run():
        model, optimizer, step, options = ddp()
        watch = md.watch(model, optimizer, loss=loss_sum, every=3, **options)
        found = []
        for number in range(4):
            batch = rows_of(number, dist.get_rank())

            def one(batch=batch, number=number):
                with watch([batch]):
                    through = None if number == 0 else model.module
                    plain(model, optimizer, batch, through=through)

            found.append(words_of(one))
        return found

    first, second, third, fourth = pools(2)(run)[1]
    assert first == second == third == "" and "rank 1 has other values" in fourth


def test_a_look_does_not_change_the_training(pools):
    """Though the function that makes the bare model seeds torch."""

    def run(every):
        def bare():
            torch.manual_seed(0)
            return mlp(nn.Dropout(0.3))

        torch.manual_seed(5 + dist.get_rank())
        model, optimizer, step, options = ddp(lambda: mlp(nn.Dropout(0.3)))
        watch = md.watch(model, optimizer, loss=loss_sum, every=every, **options | {"bare": bare})
        for number in range(3):
            batch = rows_of(number, dist.get_rank())
            with watch([batch]):
                step(model, optimizer, batch)
        return model.module[0].weight.detach()

    assert torch.equal(pools(2)(run, 1)[0], pools(2)(run, 100)[0])


def test_a_batch_may_be_any_slice(pools):
    def run():
        model, optimizer, step, options = ddp()
        watch = md.watch(model, optimizer, loss=loss_sum, **options)
        images, labels = rows_of(0, 0)
        batch = images[dist.get_rank() :: 2][:1], labels[dist.get_rank() :: 2][:1]
        with watch([batch]):
            step(model, optimizer, batch)

    pools(2)(run)


def not_a_number(model, batch):
    return loss_sum(model, batch)[0]


def does_not_fit():
    raise torch.OutOfMemoryError("rank 0 is full")


class Strange(SGD):
    def __init__(self, params, *, momentum_of_inertia):
        super().__init__(params, lr=0.1)


def strange(params):
    return Strange(params, momentum_of_inertia=1.0)


CANNOT = {
    "a loss that gives no number": (Adam, {"loss": not_a_number}, "and their number"),
    "a model that does not fit": (Adam, {"bare": does_not_fit}, "rank 0 is full"),
    "an optimizer that it cannot make": (strange, {}, "momentum_of_inertia"),
}


@pytest.mark.parametrize("what", CANNOT)
def test_where_it_cannot_look_training_goes_on(pools, what):
    kind, options, words = CANNOT[what]

    def run():
        model, optimizer, step, more = ddp(kind=kind)
        before = model.module[0].weight.clone()
        watch = md.watch(model, optimizer, **{"loss": loss_sum} | more | options)
        batch = rows_of(0, dist.get_rank())
        with warnings.catch_warnings(record=True) as caught, watch([batch]):
            step(model, optimizer, batch)
        return [str(each.message) for each in caught], torch.equal(before, model.module[0].weight)

    (found, same), (others, _) = pools(2)(run)
    assert not same and others == found
    assert len(found) == 1 and found[0].startswith("md.watch cannot compare step 1")
    assert words in found[0]


# ---- the idea -----------------------------------------------------------------------------------


def test_a_mixture_is_found():
    gradients = [torch.randn(7, 5) for _ in range(4)]
    wanted = torch.tensor([0.5, 0.0, -1.0, 4.0], dtype=torch.float64)
    g = sum(w * each.double() for w, each in zip(wanted, gradients, strict=True))
    weights, left = mixture(g, gradients)
    assert torch.allclose(weights, wanted) and left < 1e-12
    assert mixture(g + 0.1 * torch.randn(7, 5), gradients)[1] > 1e-3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_an_optimizer_saw(name):
    kind, options = OPTIMIZERS[name]
    p = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    optimizer = kind([p], **options | {"weight_decay": 0.1})
    for _ in range(3):
        p.grad = torch.randn_like(p)
        w0, before = p.detach().clone(), {k: v.clone() for k, v in optimizer.state[p].items()}
        optimizer.step()
        after = {k: v for k, v in optimizer.state[p].items() if v is not None}
        seen = seen_by(optimizer.param_groups[0], before, after, w0, p.detach())
        assert seen is not None
        assert md.parity.relative_difference(seen[0], p.grad) < 1e-12
