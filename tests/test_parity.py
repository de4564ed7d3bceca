"""The oracle itself: what is right passes, and each wrong way to train is found and named."""

import math
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minidist as md
from minidist.instruments import parity
from minidist.instruments.parity import ParityError, relative_difference
from minidist.instruments.parity.differences import missing

MODELS = {
    "mlp": (parity.digits_mlp, None),
    "convnet": (md.zoo.convnet, None),
    "transformer": (md.zoo.Transformer, md.zoo.text()),
}


OPTIMIZERS = {
    "momentum": parity.momentum,
    "adam": torch.optim.Adam,
    "adamw": partial(torch.optim.AdamW, weight_decay=0.1),
}
SGD = partial(torch.optim.SGD, lr=0.1)
OURS, CPU = md.DistributedDataParallel, torch.device("cpu")


def average(tensors, world_size=None):
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= world_size or dist.get_world_size()


def bare(module):
    return module


class Loop:
    """A loop of its own around a bare module: it averages by hand, with a fault at will."""

    def __init__(self, fault=None, at=(None, None)):
        self.fault, self.at, self.steps = fault, at, 0

    def __call__(self, model, optimizer, inputs, targets, loss_fn):
        self.steps += 1
        here = self.fault if self.at in ((None, None), (dist.get_rank(), self.steps)) else None
        if here == "share":
            dist.broadcast(inputs, 0)
            dist.broadcast(targets, 0)
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        if here != "weights":
            average(grads, 1 if here == "sum" else None)
        if here == "grad":
            grads[-1][0] += 1e-9
        optimizer.step()
        if here == "weights":
            average([p.data for p in model.parameters()])
        if here == "nan":
            next(model.parameters()).data[0, 0] = math.nan
        return loss * 2 if here == "loss" else loss


# ---- what is right passes -----------------------------------------------------------------------


class Partial(nn.Module):
    """Some of it frozen, some never used."""

    def __init__(self):
        super().__init__()
        self.never, self.net = md.zoo.mlp(64, 3), md.zoo.mlp(64, 32, 32, 10)
        self.net[2].requires_grad_(False)

    def forward(self, x):
        return self.net(x)


def test_distributed_data_parallel_trains_as_one_process_does(pools):
    """With so small a cap, in several buckets."""
    for name in [*MODELS, "partial"]:
        model, data = MODELS.get(name, (Partial, None))
        check = partial(parity.check, model=model, data=data, ranks=pools(3))
        ours = partial(OURS, bucket_cap_mb=0.002, find_unused_parameters=name == "partial")
        for optimizer in ("momentum", "adam") if name == "mlp" else ("adamw",):
            assert check(ours, optimizer=OPTIMIZERS[optimizer]).tolerance == 1e-12, name
    theirs = partial(TorchDDP, find_unused_parameters=True)
    check(theirs, optimizer=OPTIMIZERS["adam"])


def test_a_parity_tells_what_was_compared(pools):
    found = parity.check(OURS, ranks=pools(3), steps=2, batch_size=9, tolerance=1e-9)
    assert repr(found) == (
        "equal to one process, to 1e-09: 8 tensors and the loss, after each of 2 steps, on 3 ranks"
    )
    check = partial(parity.check, OURS, ranks=pools(3), model=md.zoo.convnet)
    found = check(optimizer=OPTIMIZERS["adam"], dtype=torch.float32)
    assert found.tolerance == 1e-4 and found.largest < 2e-5  # sums in another order
    assert found.tensors == 5 + 3 + 5 * 3  # weights, buffers, step and two means of each weight


def test_whole_weights_may_come_from_elsewhere(pools):
    """Then only these are compared, and no states."""

    def weights(spoilt, ddp):
        state = ddp.module.state_dict()
        return state | {"2.bias": state["2.bias"] + 1e-9 * spoilt}

    check = partial(parity.check, OURS, ranks=pools(2))
    found = check(weights=partial(weights, False))
    assert (found.tensors, found.largest < 1e-12) == (4, True)
    with pytest.raises(ParityError, match=r"step 1, rank 0: 2\.bias differs"):
        check(weights=partial(weights, True))
    with pytest.raises(ParityError, match=r"0\.weight is missing"):
        check(weights=lambda module: {})


# ---- every strategy: with dropout, and by steps that clip ----------------------------------------


SGD_M = {"lr": 0.1, "momentum": 0.9}


def dropping():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10))


def in_units(shard):
    def strategy(model):
        shard(model[0])
        return shard(model)

    return strategy


def zero(model, wrap=lambda model, _: OURS(model)):
    optimizer = md.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **SGD_M)
    return wrap(model, optimizer), optimizer


def torchs_zero(model):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns

    return TorchDDP(model), ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **SGD_M)


REPLICAS = {
    "ddp": OURS,
    "zero 1": zero,
    "zero 2": partial(zero, wrap=md.ShardedDataParallel),
    "fsdp": partial(md.FullyShardedDataParallel, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})),
    "fully_shard": in_units(md.fully_shard),
    "torch's ddp": TorchDDP,
    "torch's zero": torchs_zero,
    "torch's fully_shard": in_units(torch_fully_shard),
    "torch's fsdp1": partial(TorchFSDP, use_orig_params=True, device_id=CPU),
}


def step_that_clips(model, optimizer, inputs, targets, loss_fn):
    optimizer.zero_grad()
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    own = getattr(model, "clip_grad_norm_", partial(nn.utils.clip_grad_norm_, model.parameters()))
    own(0.1)
    optimizer.step()
    return loss


def step_with_rank_0s_numbers(*given):
    state = torch.get_rng_state()
    dist.broadcast(state, 0)
    torch.set_rng_state(state)
    return parity.train_step(*given)


@pytest.mark.parametrize("name", REPLICAS)
def test_dropout_and_clipping_are_those_of_one_process(pools, name):
    """Each rank draws masks of its own, and the one process the same ones for its share."""
    dtype = torch.float32 if "fsdp1" in name else torch.float64  # its clipping takes no other
    check = partial(parity.check, REPLICAS[name], model=dropping, dtype=dtype, ranks=pools(2))
    found = check(step=step_that_clips, clip=0.1)
    assert found.tensors == 8 and found.largest < found.tolerance
    for faulty in step_that_clips, step_with_rank_0s_numbers:
        with pytest.raises(ParityError, match=r"step 1, rank 0: 0\.weight differs"):
            check(step=faulty)


# ---- every strategy: a rank may have parts of the model ------------------------------------------


def train_stages(model, optimizer, *batch):
    optimizer.zero_grad()
    loss = model.train_step(*batch)
    optimizer.step()
    return loss


PLAN = {"0": "columns", "2": "rows"}
FEATURES = partial(md.tensor_parallel.parallelize_module, parallelize_plan=PLAN)
PARTS = {
    "pipeline": (partial(md.Pipeline, microbatches=2), train_stages),
    "tensor parallel": (FEATURES, parity.train_step),
}


@pytest.mark.parametrize("name", PARTS)
def test_ranks_have_the_model_together(pools, name):
    """They share a batch: each example is there twice."""
    data = [each.repeat_interleave(2, 0) for each in md.zoo.digits()]
    strategy, step = PARTS[name]
    adam = OPTIMIZERS["adam"]
    found = parity.check(strategy, step=step, data=data, optimizer=adam, ranks=pools(2))
    assert found.tensors == 4 + 3 * 4 and found.largest < 1e-12


def test_what_no_rank_has_is_named(pools):
    def forgetful(model):  # computes with a bias, and does not train it
        model[2].bias = model[2]._parameters.pop("bias").detach()
        return OURS(model)

    with pytest.raises(ParityError, match=r"^step 1, 2\.bias is missing: 10 elements"):
        parity.check(forgetful, ranks=pools(2))
    pieces = [("w", (0, 0), (1, 2)), ("w", (2, 0), (2, 2)), ("b", (0,), (2,))]
    told = missing({"w": torch.zeros(4, 2), "b": torch.zeros(2)}, pieces)
    assert told == ["w is missing: 2 elements are on no rank"]


def test_ranks_are_started_where_there_are_none():
    assert parity.check(OURS, world_size=2, steps=1).world_size == 2


# ---- what is wrong is found ---------------------------------------------------------------------


WEIGHT, MEAN = "0.weight differs", "the mean loss differs"
FAULTS = {
    "no averaging": (dict(step=parity.train_step), f"step 1, rank 0: {WEIGHT}"),
    "sum": (dict(step=Loop("sum")), f"step 1, rank 0: {WEIGHT}"),
    "share of another": (dict(step=Loop("share")), f"step 1, rank 0: {WEIGHT}"),
    "rank 2, from step 3": (dict(step=Loop("grad", (2, 3))), "step 3, rank 2: 2.bias differs"),
    "rank 1's loss, at step 2": (dict(step=Loop("loss", (1, 2))), f"step 2, {MEAN}"),
    "not a number": (dict(step=Loop("nan", (1, 2))), f"step 2, rank 1: {WEIGHT}"),
    "weights, with momentum": (
        dict(step=Loop("weights")),
        "step 1, rank 0: momentum_buffer of 0.weight differs",
    ),
    "optimizer without state": (
        dict(step=Loop(), strategy=lambda m: (m, SGD(m.parameters()))),
        "step 1, momentum_buffer of 0.weight is missing: 2048 elements are on no rank",
    ),
    "optimizer with a state more": (
        dict(step=Loop(), strategy=lambda m: (m, parity.momentum(m.parameters())), optimizer=SGD),
        "step 1, rank 0: momentum_buffer of 0.weight is there, and one process has none",
    ),
    "another shape": (
        dict(step=Loop(), strategy=lambda m: md.zoo.mlp(64, 16, 10).double()),
        "step 1, rank 0: 0.weight has shape (16, 64), not (32, 64)",
    ),
    "half the precision": (
        dict(strategy=lambda m: hooked(OURS(m))),
        f"step 1, rank 0: {WEIGHT}",
    ),
    "buffers that are never made equal": (
        dict(strategy=partial(OURS, broadcast_buffers=False), model=md.zoo.convnet),
        "step 2, rank 1: 2.running_mean differs",
    ),
}


def hooked(ddp):
    ddp.register_comm_hook(None, bf16_compress_hook)
    return ddp


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_named(pools, fault):
    options, words = FAULTS[fault]
    with pytest.raises(ParityError, match=f"^{re.escape(words)}") as raised:
        parity.check(**{"strategy": bare, "ranks": pools(3), **options})
    if "differs" in words:
        end = r", relatively by \d\.\de[+-]\d\d \(1e-12 is allowed\)"
        end = r", relatively by inf \(1e-12 is allowed\)" if "number" in fault else end
        assert re.fullmatch(r".* differs from one process" + end, str(raised.value))
    else:
        assert str(raised.value) == f"{words} (1e-12 is allowed)"


def test_means_of_weights_equal_means_of_gradients_only_for_plain_sgd(pools):
    """Then a step is linear in the gradient: nothing tells the two apart, and nothing needs to."""
    parity.check(bare, step=Loop("weights"), optimizer=SGD, ranks=pools(3))


def test_arguments_that_make_no_sense(pools):
    check = partial(parity.check, OURS, ranks=pools(3))
    with pytest.raises(TypeError, match="a function that makes a module, not a module"):
        check(model=parity.digits_mlp())
    with pytest.raises(ValueError, match="3 ranks can share evenly, not 4 steps of 16 examples"):
        check(batch_size=16)
    with pytest.raises(md.RankError, match="a parameter that is not the model's"):
        parity.check(lambda m: (m, parity.momentum(parity.digits_mlp().parameters())))
    with pytest.raises(ValueError, match="1 step or more, .* not 0 steps of 48 examples"):
        check(steps=0)


def test_relative_difference():
    t = partial(torch.tensor, dtype=torch.float64)
    assert relative_difference(t([1.0, 4.0]), t([1.0, 5.0])) == 0.2
    assert relative_difference(t([1.0, 0.5]), t([0.0, 0.0])) == math.inf
    assert relative_difference(t([0.0]), t([0.0])) == relative_difference(t([]), t([])) == 0
    unknown = relative_difference(t([1.0, math.nan]), t([1.0, math.nan]))
    assert max([0.0, unknown]) == max([unknown, 0.0]) == math.inf
    assert relative_difference(torch.tensor([True]), torch.tensor([False])) == math.inf
    assert relative_difference(torch.tensor([2**40 + 1]), torch.tensor([2**40])) == 2**-40
    assert relative_difference(t([3.0]), torch.tensor([4.0])) == 0.25
    assert relative_difference(torch.tensor([4 + 3j]), torch.tensor([4 + 0j])) == 0.75
    with pytest.raises(ValueError, match=r"shapes \(1,\) and \(2,\)"):
        relative_difference(t([1.0]), t([1.0, 1.0]))
    assert relative_difference(torch.tensor([4 + 0j]), torch.tensor([4 + 3j])) == 0.6
