"""DistributedDataParallel takes the place of torch's: its arguments, its buckets, hooks and
buffers, and a loop of which one name changes."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.swa_utils import AveragedModel

import minidist as md
from minidist.instruments.parity.differences import differences

OURS = md.DistributedDataParallel
TINY = 1e-4  # MiB: a bucket of some 13 float64 parameters


def smooth(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)).to(dtype)


def share(rank, step=0, dtype=torch.float64):
    """Other examples on each rank."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, 4, dtype=torch.float64, generator=generator).to(dtype)


def gradients(model):
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def apart(ours, theirs, allowed=1e-12):
    return [words for words, far in differences(ours, theirs) if not far <= allowed]


# ---- arguments --------------------------------------------------------------------------------


@pytest.mark.gpu(1)
def test_inputs_are_moved_to_the_device_that_is_named():
    def train():
        ddp = OURS(smooth().cuda(), device_ids=[0])
        return ddp(share(0)).device.type, OURS(smooth().cuda())(share(0).cuda()).device.type

    assert md.launch(train, world_size=1) == [("cuda", "cuda")]


def test_torchs_names_of_what_is_left_out(pools):
    """Such as experts, of which each rank has others."""

    def train():
        rank, module = dist.get_rank(), smooth()
        module[2] = nn.Linear(16, 2 + rank).double()
        module.register_buffer("mean", torch.tensor(float(rank)))
        names = ["2.weight", "2.bias", "mean"]
        TorchDDP._set_params_and_buffers_to_ignore_for_model(module, names)
        OURS(module)(share(rank)).sum().backward()
        return module[0].weight.grad, tuple(module[2].bias.grad.shape), module.mean.item()

    (first, size, mean), (second, other, other_mean) = pools(2)(train)
    assert torch.equal(first, second) and (size, mean) == ((2,), 0)
    assert (other, other_mean) == ((3,), 1)


class Model(nn.Linear):
    def penalty(self):
        return self.weight.pow(2).sum()


def test_methods_are_the_modules_alone(pools):
    def look():
        model = OURS(Model(4, 2))
        assert model.out_features == 2 and not hasattr(model, "penalty")
        with pytest.raises(AttributeError, match=r"what penalty\(\) computes alone"):
            _ = model.penalty

    pools(2)(look)


# ---- buckets, and parameters without gradient -------------------------------------------------


def test_torch_has_the_same_buckets(pools):
    def sent(wrap, width, cap):
        """Of the second pass, for in the first torch has one bucket."""
        module = md.zoo.mlp(4, *[width] * 5, 2)
        ddp, found = wrap(module, bucket_cap_mb=cap), []
        numbers = {p: i for i, p in enumerate(module.parameters())}

        def hook(_, bucket: dist.GradBucket):
            found.append(([numbers[p] for p in bucket.parameters()], bucket.is_last()))
            return default_hooks.allreduce_hook(None, bucket)

        ddp.register_comm_hook(None, hook)
        for step in range(2):
            found.clear()
            ddp(share(0, step, torch.float32)).sum().backward()
        return found

    for width, cap in (300, None), (300, 0.5), (8, TINY):  # 4 * 300 * 300 bytes a layer
        ours, theirs = (pools(2)(sent, wrap, width, cap) for wrap in (OURS, TorchDDP))
        assert ours == theirs and len(ours[0]) > 1, (width, cap)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        for i, name in enumerate("abcd"):
            setattr(self, name, smooth(seed=i))

    def forward(self, x, use):
        return sum(getattr(self, name)(x) for name in use)


USES = {  # by step and rank
    "other ones on each": [("a", "ab", "c")] * 3,
    "other ones at each step": [("ab", "ab", "c"), ("a", "a", "a"), ("abc", "b", "d")],
}


@pytest.mark.parametrize("no_sync", [False, True])
def test_parameters_may_be_left_without_gradient(pools, no_sync):
    """As torch has it, and as one process that takes all ranks' examples."""

    def train(used):
        plain, options = Branches(), {"find_unused_parameters": True, "bucket_cap_mb": TINY}
        models = [OURS(Branches(), **options), TorchDDP(Branches(), **options), plain]
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in models]
        for step, uses in enumerate(used):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                ranks = range(3) if model is plain else [dist.get_rank()]
                for rank in ranks:
                    if no_sync:  # the ranks use a branch more, each another one
                        with getattr(model, "no_sync", contextlib.nullcontext)():
                            (model(share(rank, step), "dca"[rank]).sum() / len(ranks)).backward()
                    (model(share(rank, step), uses[rank]).sum() / len(ranks)).backward()
                optimizer.step()
            for model, optimizer in zip(models[:2], optimizers, strict=False):
                states = [{**m.state_dict(), **gradients(m)} for m in (model.module, plain)]
                if found := apart(*states) or len(optimizer.state) != len(optimizers[2].state):
                    return f"{type(model).__module__}, step {step}: {found}"
        return None

    for name, used in USES.items():
        assert pools(3)(train, used) == [None] * 3, name


# ---- communication hooks ----------------------------------------------------------------------


def power():
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3)


def a_tensor_of_its_own(_, bucket: dist.GradBucket):
    future = dist.all_reduce(bucket.buffer().clone(), async_op=True).get_future()
    return future.then(lambda arrived: arrived.value()[0] / dist.get_world_size())


HOOKS = {  # and how far from the mean they may be
    "the mean, elsewhere": (lambda: None, a_tensor_of_its_own, 1e-6),
    "float16": (lambda: None, default_hooks.fp16_compress_hook, 1e-2),
    "PowerSGD": (power, powerSGD_hook.powerSGD_hook, 1),
}


def trained_with(wrap, hook):
    module = smooth(dtype=torch.float32)
    ddp = wrap(module)
    if hook:
        make_state, function, _ = HOOKS[hook]
        ddp.register_comm_hook(make_state(), function)
    for step in range(5):
        module.zero_grad()
        ddp(share(dist.get_rank(), step, torch.float32)).pow(2).mean().backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_hooks_do_in_ours_what_they_do_in_torchs(pools):
    exact, differ = pools(3)(trained_with, TorchDDP, None)[0], md.parity.relative_difference
    for hook, (_, _, allowed) in HOOKS.items():
        ours, theirs = (pools(3)(trained_with, wrap, hook) for wrap in (OURS, TorchDDP))
        assert all(torch.equal(ours[0], other) for other in ours), hook
        assert differ(ours[0], theirs[0]) < 2e-3, hook  # sums in another order, and rounded
        assert differ(ours[0], exact) < allowed, hook
        assert "mean" in hook or differ(ours[0], exact) > 1e-5, hook


# ---- buffers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_running_means_are_rank_0s_when_torchs_are(pools, broadcast_buffers):
    kinds = "TTETAETTNTE"  # training, evaluation, evaluation with gradients, no_sync

    def train():
        rank, (images, labels) = dist.get_rank(), md.zoo.digits(torch.float64)
        models = [md.zoo.convnet().double(), md.zoo.convnet().double()]
        ours = OURS(models[0], broadcast_buffers=broadcast_buffers, bucket_cap_mb=TINY)
        theirs = TorchDDP(models[1], forward_sync_buffers=broadcast_buffers)
        seen = []
        for number, kind in enumerate(kinds):
            x, y = images[rank + number :: 100], labels[rank + number :: 100]
            for ddp in (ours, theirs):
                ddp.train(kind not in "EA")
                with ddp.no_sync() if kind == "N" else contextlib.nullcontext():
                    with torch.set_grad_enabled(kind != "E"):
                        output = ddp(x)
                    if kind != "E":
                        nn.functional.cross_entropy(output, y).backward()
            seen.append(models[0][2].running_mean.tolist())
            states = [{**model.state_dict(), **gradients(model)} for model in models]
            assert not apart(*states), number
        return seen

    zero, one = pools(2)(train)
    together = [a == b for a, b in zip(zero, one, strict=True)]
    # Equal at the forward pass for evaluation after one for training, not by one for training.
    assert together == [broadcast_buffers and kind in "EA" for kind in kinds]


# ---- a loop -----------------------------------------------------------------------------------


def test_a_loop_with_the_name_of_the_class_changed(pools):
    """It takes a checkpoint, accumulates by torch's attribute, clips, averages
    weights in a copy and by torch's AveragedModel, and evaluates."""
    start = smooth(seed=7).state_dict()

    def train(wrap):
        rank = dist.get_rank()
        model = wrap(smooth(seed=rank), device_ids=None, output_device=None)
        model.module.load_state_dict(start)
        average, ema = AveragedModel(model), copy.deepcopy(model).requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            optimizer.zero_grad()
            for micro in range(2):
                model.require_backward_grad_sync = micro == 1
                (model(share(rank, 2 * step + micro)).pow(2).mean() / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            average.update_parameters(model)
            for old, new in zip(ema.parameters(), model.parameters(), strict=True):
                old.lerp_(new.detach(), 0.2)
        with torch.no_grad():
            made = [each.eval()(share(9)) for each in (model, average, ema)]
        return {**model.module.state_dict(), **dict(zip("abc", made, strict=True))}

    for ours, theirs in zip(pools(2)(train, OURS), pools(2)(train, TorchDDP), strict=True):
        assert not torch.equal(theirs["a"], theirs["b"]) and not apart(ours, theirs)
