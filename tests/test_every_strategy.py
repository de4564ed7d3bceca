"""What holds of every strategy: its loops may evaluate in inference mode, and a reader of one step
opens few files."""

import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.optim import Adam

import minidist as md
from minidist.fully_sharded import by_class
from minidist.tensor_parallel import parallelize_module

ROOM = Path(md.__file__).parent


def net():
    torch.manual_seed(0)
    return md.zoo.mlp(6, 8, 8, 4, dtype=torch.float64)


def zero_1(model):
    model = md.DistributedDataParallel(model)
    return model, md.ZeroRedundancyOptimizer(model.parameters(), Adam, lr=0.01)


def zero_2(model):
    optimizer = md.ZeroRedundancyOptimizer(model.parameters(), Adam, lr=0.01)
    return md.ShardedDataParallel(model, optimizer), optimizer


def with_adam(wrap):
    def made(model):
        model = wrap(model)
        return model, Adam(model.parameters(), lr=0.01)

    return made


def fully_shard(model):
    for layer in model:
        if isinstance(layer, nn.Linear):
            md.fully_shard(layer)
    return md.fully_shard(model)


def fsdp(model):
    return md.FullyShardedDataParallel(model, auto_wrap_policy=by_class(nn.Linear))


def mixed(model):
    return md.mixed.MixedParallel(model, md.mixed.mesh(data=2), 2)


MADE = {
    "ddp": with_adam(md.DistributedDataParallel),
    "zero 1": zero_1,
    "zero 2": zero_2,
    "fsdp": with_adam(fsdp),
    "fully_shard": with_adam(fully_shard),
    "pipeline": with_adam(lambda model: md.Pipeline(model, 2)),
    "mixed": with_adam(mixed),
}


def examples(step):
    """(ranks, rows, 6): other ones for each rank and step."""
    return torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def take_step(kind, model, optimizer, step):
    inputs = examples(step)[0 if kind == "pipeline" else dist.get_rank()]
    targets = torch.full((5, 4), 1.0 * step, dtype=torch.float64)
    optimizer.zero_grad()
    if kind in ("pipeline", "mixed"):
        model.train_step(inputs, targets, F.mse_loss)
    else:
        F.mse_loss(model(inputs), targets).backward()
    optimizer.step()


@pytest.mark.parametrize("first", [True, False], ids=["before training", "between steps"])
@pytest.mark.parametrize("kind", MADE)
def test_a_loop_may_evaluate_in_inference_mode(pools, kind, first):
    def run():
        model, optimizer = MADE[kind](net())
        plain = net()
        alone = Adam(plain.parameters(), lr=0.01)
        apart = []
        for step in range(4):
            if first or step:
                with torch.inference_mode():
                    found, wanted = (each(examples(9)[0]) for each in (model, plain))
                    apart.append(md.parity.relative_difference(found, wanted))
            take_step(kind, model, optimizer, step)
            alone.zero_grad()
            rows = examples(step)[:1] if kind == "pipeline" else examples(step)
            targets = torch.full((len(rows), 5, 4), 1.0 * step, dtype=torch.float64)
            F.mse_loss(plain(rows), targets).backward()
            alone.step()
        return max(apart)

    assert max(pools(2)(run)) < 1e-12


def by_features(model):
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, parallelize_plan=plan)


@pytest.mark.parametrize("wrap", [fsdp, fully_shard, by_features])
def test_a_mesh_is_of_the_devices_where_the_module_is(pools, wrap):
    """Here on the CPU, though the rank has a GPU: its group speaks NCCL."""

    def run():
        with mock.patch.object(dist, "get_backend_config", lambda *_: "cpu:gloo,cuda:nccl"):
            assert md.rank.device().type == "cuda"
            model = wrap(net())
        model(examples(0)[dist.get_rank()]).sum().backward()
        return {p.device_mesh.device_type for p in model.parameters() if isinstance(p, DTensor)}

    assert pools(2)(run) == [{"cpu"}] * 2


# The helpers in `common` and `collectives` say by their names what they do; all else is to be read.
# A mesh is read with the pipeline that it consists of. fsdp: five, and the collectives of ZeRO.
MOST = dict.fromkeys(MADE, 5) | {"fully_shard": 6, "fsdp": 7, "mixed": 7}


@pytest.mark.parametrize("kind", MADE)
def test_a_reader_of_one_step_opens_few_files(pools, kind):
    def run():
        model, optimizer = MADE[kind](net())
        take_step(kind, model, optimizer, 0)  # afterwards all is as it stays
        seen = set()

        def note(frame, event, _):
            if event == "call":
                seen.add(frame.f_code.co_filename)

        sys.setprofile(note)
        threading.setprofile(note)
        try:
            take_step(kind, model, optimizer, 1)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        return seen

    within = [Path(name).relative_to(ROOM) for name in pools(2)(run)[0] if str(ROOM) in name]
    below = "common", "collectives", "measure", "backend", "runtime", "rank.py"
    read = sorted(str(name) for name in within if name.parts[0] not in below)
    assert read and len(read) <= MOST[kind], read
