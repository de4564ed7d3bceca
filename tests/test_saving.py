"""Checkpoints that survive: every strategy, any world size, kills at any moment, bad files."""

import contextlib
import errno
import hashlib
import math
import os
import random
import re
import resource
import shutil
import signal
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from programs import SEED, Program
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import TensorDataset

import minidist as md
from minidist.mixed import MixedParallel
from minidist.parity.snapshot import relative_difference
from minidist.saving import Batches, Checkpoints, commit
from minidist.saving.box_plan import BoxPlan
from minidist.saving.boxes import span_boxes, spread, whole_box

# ---- strategies, and one training for all of them --------------------------------------------

BATCH = 16


def tokens():
    return TensorDataset(*(each[:100] for each in md.zoo.text(8)))


def transformer():
    return md.zoo.Transformer(length=8, width=16, heads=2, layers=2).double()


adam = partial(torch.optim.Adam, lr=1e-2)


def bare():
    model = transformer()
    return model, adam(model.parameters())


def ddp():
    model = md.DistributedDataParallel(transformer())
    return model, adam(model.parameters())


def torch_ddp():
    model = TorchDDP(transformer())
    return model, adam(model.parameters())


def zero_1():
    model = md.DistributedDataParallel(transformer())
    return model, md.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)


def zero_2():
    model = transformer()
    optimizer = md.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
    return md.ShardedDataParallel(model, optimizer), optimizer


def fsdp():
    policy = md.fully_sharded.by_class(md.zoo.Block)
    model = md.FullyShardedDataParallel(transformer(), auto_wrap_policy=policy)
    return model, adam(model.parameters())


def in_place():
    model = transformer()
    for block in model.blocks:
        md.fully_shard(block)
    md.fully_shard(model)
    return model, adam(model.parameters())


def features():
    """Of torch's DTensors; but for embedding and head, so that logits are whole."""
    plan = md.tensor_parallel.transformer_plan(transformer())
    plan = {name: style for name, style in plan.items() if name.startswith("blocks")}
    model, mesh = transformer(), md.mixed.mesh(tensor=dist.get_world_size())
    md.tensor_parallel.parallelize_module(model, mesh["tensor"], plan)
    model.mesh = mesh
    return model, adam(model.parameters())


def mixed(data=1, pipeline=1, tensor=1, shard=None, zero=False):
    mesh = md.mixed.mesh(data, pipeline, tensor)
    model = MixedParallel(transformer(), mesh, 2, shard=shard)
    if zero:
        group = mesh.get_group("data")
        return model, md.ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, group, lr=1e-2
        )
    return model, adam(model.parameters())


def offload():
    model = md.DistributedDataParallel(transformer())
    return model, md.OffloadedOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)


def zero_offload():
    model = md.DistributedDataParallel(transformer())
    adam_there = md.OffloadedOptimizer.of(torch.optim.Adam)
    return model, md.ZeroRedundancyOptimizer(model.parameters(), adam_there, lr=1e-2)


def hybrid():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    hybrid_shard = ShardingStrategy.HYBRID_SHARD
    model = md.FullyShardedDataParallel(
        transformer(), device_mesh=mesh, sharding_strategy=hybrid_shard
    )
    return model, adam(model.parameters())


def recompute():
    model = transformer()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = md.checkpoint_wrapper(block)
    model = md.DistributedDataParallel(model)
    return model, adam(model.parameters())


STRATEGIES = {
    "bare": (1, bare),
    "ddp": (2, ddp),
    "torch_ddp": (2, torch_ddp),
    "ddp4": (4, ddp),
    "zero_1": (2, zero_1),
    "zero_2": (4, zero_2),
    "fsdp": (2, fsdp),
    "fsdp4": (4, fsdp),
    "in_place": (2, in_place),
    "hybrid": (4, hybrid),
    "offload": (2, offload),
    "zero_offload": (2, zero_offload),
    "recompute": (2, recompute),
    "features": (2, features),
    "tensor": (2, partial(mixed, tensor=2)),
    "pipeline": (2, partial(mixed, pipeline=2)),
    "mixed": (4, partial(mixed, pipeline=2, tensor=2)),
    "mixed_zero": (4, partial(mixed, data=2, tensor=2, zero=True)),
    "mixed_fsdp": (4, partial(mixed, data=2, tensor=2, shard=md.FullyShardedDataParallel)),
}


def data_of(model):
    group = model.mesh.get_group("data") if hasattr(model, "mesh") else None
    return Batches(tokens(), BATCH, process_group=group)


def train(model, optimizer, batches, steps):
    for _, (inputs, targets) in zip(range(steps), batches, strict=False):
        optimizer.zero_grad()
        if isinstance(model, MixedParallel):
            model.train_step(inputs, targets, model.cross_entropy)
        else:
            outputs = model(inputs)
            nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()


def run(make, folder, until, save=True):
    """Train from the newest checkpoint until a step, and save there. Returns the whole model."""
    model, optimizer = make()
    batches = data_of(model)
    with Checkpoints(folder) as checkpoints:
        step = checkpoints.load(model=model, optimizer=optimizer, data=batches) or 0
        train(model, optimizer, batches, until - step)
        if save:
            checkpoints.save(until, model=model, optimizer=optimizer, data=batches)
    return whole(model)


def whole(model):
    if isinstance(model, MixedParallel):
        return model.full_state_dict()
    state = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
    full = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in state.items()}
    return {name: value.clone() for name, value in full.items()}


def same(found, wanted):
    assert found.keys() == wanted.keys()
    return all(torch.equal(found[name], wanted[name]) for name in wanted)


def on_ranks(pools, strategy, folder, until, save=True):
    ranks, make = STRATEGIES[strategy]
    return pools(ranks)(run, make, folder, until, save)[0]


@pytest.fixture(scope="module")
def uninterrupted(pools):
    """The model after six steps, by a strategy; "bare" for all the others to be held against."""
    found = {}

    def after_six(strategy, folder):
        if strategy not in found:
            found[strategy] = on_ranks(pools, strategy, folder / "uninterrupted", 6, save=False)
        return found[strategy]

    return after_six


FUSED = pytest.mark.newer_torch("fused")  # `whole` asks torch for what is split


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=FUSED if name == "features" else ()) for name in STRATEGIES],
)
def test_a_run_goes_on_to_the_bit(pools, tmp_path, strategy, uninterrupted):
    wanted = uninterrupted(strategy, tmp_path)
    on_ranks(pools, strategy, tmp_path / "a", 3)
    found = on_ranks(pools, strategy, tmp_path / "a", 6)
    assert same(found, wanted)


CHAINS = [
    ["bare", "fsdp4", "zero_1", "mixed", "ddp"],
    ["mixed_fsdp", "zero_2", "bare", "tensor", "in_place"],
    ["ddp4", "mixed_zero", "fsdp", "pipeline", "torch_ddp"],
    ["zero_1", "mixed_fsdp", "ddp", "fsdp4", "mixed"],
    pytest.param(["features", "zero_1", "mixed", "fsdp", "bare"], marks=FUSED),
    ["hybrid", "offload", "recompute", "zero_offload", "zero_2"],
]


@pytest.mark.parametrize("chain", CHAINS, ids="-".join)
def test_other_strategies_and_world_sizes_go_on(pools, tmp_path, chain, uninterrupted):
    wanted = uninterrupted("bare", tmp_path)
    for step, strategy in enumerate([*chain, chain[0]], start=1):
        found = on_ranks(pools, strategy, tmp_path / "a", step)
    assert found.keys() == wanted.keys()
    assert max(relative_difference(found[name], wanted[name]) for name in wanted) < 1e-12


# ---- what else goes on -----------------------------------------------------------------------


class Dropped(nn.Sequential):
    """Random numbers of its own in every step, on every rank."""

    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3))


def with_random_numbers(folder, until, save=True):
    torch.manual_seed(dist.get_rank() + 1)
    random.seed(dist.get_rank() + 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Dropped()
        data = TensorDataset(torch.randn(50, 6), torch.randint(3, (50,)))
    model = md.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    batches = Batches(data, 8)
    parts = dict(model=model, optimizer=optimizer, scheduler=scheduler, data=batches)
    with Checkpoints(folder) as checkpoints:
        step = checkpoints.load(**parts) or 0
        for _, (inputs, targets) in zip(range(until - step), batches, strict=False):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            scheduler.step()
        if save:
            checkpoints.save(until, **parts)
    return whole(model), scheduler.get_last_lr(), torch.rand(3), random.random()


def test_random_numbers_schedulers_and_buffers_go_on_on_every_rank(pools, tmp_path):
    wanted = pools(2)(with_random_numbers, tmp_path / "a", 7, False)
    pools(2)(with_random_numbers, tmp_path / "b", 3)
    found = pools(2)(with_random_numbers, tmp_path / "b", 7)
    for ours, theirs in zip(found, wanted, strict=True):
        assert all(torch.equal(ours[0][name], theirs[0][name]) for name in theirs[0])
        assert ours[1] == theirs[1] and torch.equal(ours[2], theirs[2]) and ours[3] == theirs[3]
    assert not torch.equal(found[0][2], found[1][2])


def test_new_ranks_have_random_numbers_of_their_own(pools, tmp_path):
    pools(2)(with_random_numbers, tmp_path / "a", 3)
    numbers = [float(each[2][0]) for each in pools(4)(with_random_numbers, tmp_path / "a", 4)]
    assert len(set(numbers)) == 4


class PerRank:
    """A state that is another one on each rank."""

    def __init__(self):
        self.state = {"rank": dist.get_rank()}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def save_per_rank(folder, load):
    thing, model = PerRank(), nn.Linear(2, 2)
    with Checkpoints(folder) as checkpoints:
        if load:
            thing.state = None
            checkpoints.load(model=model, thing=thing)
        else:
            checkpoints.save(1, model=model, thing=thing)
    return thing.state["rank"]


def test_a_state_of_each_rank_goes_to_that_rank_and_to_no_other_number(pools, tmp_path):
    pools(2)(save_per_rank, tmp_path, False)
    assert pools(2)(save_per_rank, tmp_path, True) == [0, 1]
    with pytest.raises(md.RankError, match="thing is another one on each of 2 ranks, so 4"):
        pools(4)(save_per_rank, tmp_path, True)


class Count(nn.Linear):
    """Its extra state is a tensor."""

    number = 0

    def get_extra_state(self):
        return torch.tensor(self.number)

    def set_extra_state(self, state):
        self.number = int(state)


def save_count(folder, wrap):
    model = nn.Sequential(Count(2, 2))
    wrapped = wrap(model)
    with Checkpoints(folder) as checkpoints:
        for model[0].number in 5, 6:
            checkpoints.save(model[0].number, model=wrapped)
        model[0].number = 0
        checkpoints.load(model=wrapped)
    return model[0].number


@pytest.mark.parametrize(
    "wrap", [nn.Sequential, TorchDDP, md.DistributedDataParallel, md.FullyShardedDataParallel]
)
def test_an_extra_state_goes_on(pools, tmp_path, wrap):
    assert pools(2)(save_count, tmp_path, wrap) == [6, 6]


class Packed(nn.Linear):
    """In its state the weight is whole numbers, and a scale that no module has."""

    def __init__(self, takes=True):
        super().__init__(2, 2)
        self.register_state_dict_post_hook(self.pack)
        if takes:
            self.register_load_state_dict_pre_hook(self.unpack)

    @staticmethod
    def pack(module, state, prefix, _):
        scale = module.weight.detach().abs().max() / 127
        state[f"{prefix}weight"] = (
            (state[f"{prefix}weight"].detach() / scale).round().to(torch.int8)
        )
        state[f"{prefix}scale"] = scale

    @staticmethod
    def unpack(module, state, prefix, *_):
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * state.pop(f"{prefix}scale")


def save_packed(folder, wrap):
    torch.manual_seed(0)
    wrapped = wrap(nn.Sequential(Packed(), nn.Linear(2, 2)))
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, model=wrapped)
        saved = {name: value.clone() for name, value in wrapped.state_dict().items()}
        with torch.no_grad():
            for parameter in wrapped.parameters():
                parameter.fill_(5)
        checkpoints.load(model=wrapped)
    return same(saved, wrapped.state_dict())


@pytest.mark.parametrize("wrap", [nn.Sequential, TorchDDP, md.DistributedDataParallel])
def test_what_a_hook_makes_for_the_state_goes_on(pools, tmp_path, wrap):
    assert pools(2)(save_packed, tmp_path, wrap) == [True] * 2


@pytest.mark.parametrize("wrap", [md.FullyShardedDataParallel, md.fully_shard])
def test_what_a_hook_makes_of_shards_is_refused(pools, tmp_path, wrap):
    with pytest.raises(md.RankError, match="TypeError: .*0.weight is no parameter of the model"):
        pools(2)(save_packed, tmp_path, wrap)


def test_what_a_hook_makes_of_features_is_refused(pools, tmp_path):
    def narrow(module, state, prefix, _):
        state.update({name: value.half() for name, value in state.items()})

    def run(folder):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        md.tensor_parallel.split(model, None, {"0": "columns", "1": "rows"})
        model.register_state_dict_post_hook(narrow)
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(1, model=model)

    with pytest.raises(md.RankError, match="TypeError: .*0.weight is no parameter of the model"):
        pools(2)(run, tmp_path)


def test_torchs_sharded_model_is_saved_after_an_evaluation(pools, tmp_path):
    """It stays gathered then, until a hook for its state shards it again."""

    def run(folder):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        torch_fully_shard(model)
        with torch.no_grad():
            model(torch.ones(2, 4))
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(1, model=model)
        return {name: p.full_tensor() for name, p in model.named_parameters()}

    saved = pools(2)(run, tmp_path)[0]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.load(model=(alone := nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))
    assert same(saved, alone.state_dict())


def test_what_a_hook_makes_and_nothing_takes_is_refused(tmp_path):
    model = nn.Sequential(Packed(takes=False))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, model=model)
        with pytest.raises(ValueError, match="the model has no place for 0.scale"):
            checkpoints.load(model=model)
        model[0] = nn.Linear(2, 2)
        with pytest.raises(ValueError, match="it is of another model"):
            checkpoints.load(model=model)
        checkpoints.save(2, model=model)
        with pytest.raises(ValueError, match="it is of another model: it has no 0.weight"):
            checkpoints.load(model=nn.Sequential(Packed()))


def wide(number):
    """A buffer whose elements are one in memory, a column of them, and one that was so."""
    model = nn.Linear(2, 2)
    model.register_buffer("one", torch.full((1,), number).expand(4))
    model.register_buffer("masked", torch.full((1,), math.nan).expand(3))
    model.register_buffer("column", (torch.arange(3.0) + number).view(3, 1).expand(3, 2))
    model.register_buffer("whole", model.one.clone())
    return model


def test_a_buffer_that_is_expanded_goes_on(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, model=(saved := wide(5.0)))
        assert checkpoints.load(model=(loaded := wide(7.0))) == 1
        for name, value in saved.named_buffers():
            torch.testing.assert_close(
                loaded.get_buffer(name), value, rtol=0, atol=0, equal_nan=True
            )
        assert loaded.one.stride() == (0,) and torch.equal(loaded.weight, saved.weight)
        saved.one = torch.arange(4.0)
        checkpoints.save(2, model=saved)
        with pytest.raises(ValueError, match="elements are one in memory.* other numbers"):
            checkpoints.load(model=loaded)
        saved.one, loaded.one = torch.ones(1).expand(4), torch.zeros(4)
        checkpoints.save(3, model=saved)
        assert checkpoints.load(model=loaded) == 3 and loaded.one.tolist() == [1] * 4


def test_a_state_on_a_gpu_loads_where_there_is_none(tmp_path, monkeypatch):
    thing, model = Plain(counts=torch.tensor([1, 2])), nn.Linear(2, 2)
    written = thing.state
    with Checkpoints(tmp_path) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr("torch.serialization.location_tag", lambda _: "cuda:1")
            checkpoints.save(1, model=model, thing=thing)
        assert checkpoints.load(model=model, thing=thing) == 1
    assert thing.state["counts"].tolist() == [1, 2] and thing.state is not written


# ---- data --------------------------------------------------------------------------------------


def numbers(folder, length, batch, seed, steps, options):
    """Which examples this rank sees, batch by batch; it goes on with a run, and saves it."""
    batches = Batches(TensorDataset(torch.arange(length)), batch, seed, **options)
    with Checkpoints(folder) as checkpoints:
        start = checkpoints.load(model=nn.Linear(1, 1), data=batches) or 0
        found = [own.tolist() for _, (own,) in zip(range(steps), batches, strict=False)]
        checkpoints.save(start + steps, model=nn.Linear(1, 1), data=batches)
    return found


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "prefetch_factor": 4}])
def test_no_example_is_lost_or_repeated_when_the_number_of_ranks_changes(pools, tmp_path, options):
    seen, batches = [], []
    for ranks, steps in (2, 3), (4, 4), (1, 2), (2, 4):
        found = pools(ranks)(numbers, tmp_path / "a", 31, 8, 5, steps, options)
        for batch in zip(*found, strict=True):
            batches.append(sorted(number for own in batch for number in own))
            seen += [own[i] for i in range(8 // ranks) for own in batch]
    epochs = [seen[begin : begin + 31] for begin in range(0, 104 - 31, 31)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(31))] * 3
    assert len(set(map(tuple, epochs))) == 3  # each in another order
    alone = pools(1)(numbers, tmp_path / "b", 31, 8, 5, 13, {})[0]
    assert batches == [sorted(batch) for batch in alone]


class Noise(TensorDataset):
    """Each example is drawn when it is asked for, as augmentation is."""

    def __getitem__(self, _):
        return torch.rand(())


def noise(seed):
    batches = Batches(Noise(torch.arange(30)), 4, seed, num_workers=1)
    return next(iter(batches)).tolist()


def test_workers_draw_other_numbers_on_each_rank_and_for_each_seed(pools):
    drawn = [own for seed in (0, 1) for own in pools(2)(noise, seed)]
    assert len({tuple(own) for own in drawn}) == 4
    assert pools(2)(noise, 0) == drawn[:2]


def test_batches_without_a_group_and_without_shuffling():
    batches = Batches(TensorDataset(torch.arange(5)), 2, seed=None)
    assert [own.tolist() for _, (own,) in zip(range(3), batches, strict=False)] == [
        *([0, 1], [2, 3], [4, 0])
    ]
    assert batches.epoch == 1 and batches.state_dict() == {"examples": 6, "seed": None, "length": 5}
    with pytest.raises(ValueError, match="length was 4, and is 5 now"):
        batches.load_state_dict({"examples": 6, "seed": None, "length": 4})
    with pytest.raises(ValueError, match="1 ranks cannot share batches of 0"):
        Batches(TensorDataset(torch.arange(5)), 0)
    with pytest.raises(ValueError, match="dataset is empty"):
        Batches(TensorDataset(torch.arange(0)), 1)


# ---- boxes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 3), (3, 1, 4), (2, 3, 4, 2), (0, 3)])
def test_a_span_is_its_boxes(shape):
    for layout in (list(range(len(shape))), list(reversed(range(len(shape))))):
        like = torch.empty([shape[dim] for dim in layout]).permute(
            [layout.index(dim) for dim in range(len(shape))]
        )
        count = like.numel()
        values = torch.arange(count).as_strided(like.shape, like.stride())
        for start in range(count + 1):
            for stop in range(start, count + 1):
                found = torch.full(like.shape, -1)
                own, boxes = torch.arange(start, stop), span_boxes(like, slice(start, stop))
                assert len(boxes) <= max(1, 2 * len(shape) - 1)
                for box in boxes:
                    at = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
                    assert (found[at] == -1).all()
                    found[at] = box.view(own)
                inside = (values >= start) & (values < stop)
                assert torch.equal(found, torch.where(inside, values, -1))


def test_features_of_several_runs_are_a_box_each():
    wholly = torch.arange(24).view(4, 6)
    indices = torch.tensor([0, 1, 4, 5, 3])
    boxes = spread(whole_box((4, 5)), 1, indices)
    assert [(box.offsets, box.sizes) for box in boxes] == [
        *(((0, 0), (4, 2)), ((0, 4), (4, 2)), ((0, 3), (4, 1)))
    ]
    own = wholly[:, indices]
    for box in boxes:
        (a, b), (c, d) = box.offsets, box.sizes
        assert torch.equal(box.view(own), wholly[a : a + c, b : b + d])


def test_torch_alone_reads_it(pools, tmp_path):
    """Without minidist: the parameters of the bare module, by their names, in their shapes."""
    import torch.distributed.checkpoint as dcp

    wanted = on_ranks(pools, "fsdp4", tmp_path / "a", 2)
    state = {f"model.{name}": torch.zeros_like(value) for name, value in wanted.items()}
    reader = dcp.FileSystemReader(tmp_path / "a" / "step-00000002")
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, storage_reader=reader)
    assert all(torch.equal(state[f"model.{name}"], wanted[name]) for name in wanted)


# ---- one process, and files that are not what they were ----------------------------------------


def save_steps(folder, steps=(1, 2), model=None, keep=2, **others):
    model = model or nn.Linear(30, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpoints(folder, keep) as checkpoints:
        for step in steps:
            with torch.no_grad():
                model.weight.fill_(step)
            checkpoints.save(step, model=model, optimizer=optimizer, **others)
            with torch.no_grad():
                model.weight.fill_(-1)  # what is written is a copy


def load(folder, model=None, **parts):
    model = model or nn.Linear(30, 20)
    before = [p.clone() for p in model.parameters()]
    try:
        with Checkpoints(folder) as checkpoints:
            step = checkpoints.load(model=model, **parts)
    except Exception:
        assert all(map(torch.equal, before, model.parameters()))  # nothing has changed
        raise
    assert step is None or (model.weight == step).all()
    return step


def test_the_newest_stay_and_the_first_run_begins_with_none(tmp_path):
    assert load(tmp_path / "deep" / "a") is None
    save_steps(tmp_path, range(5, 12, 2), keep=3)
    assert list(commit.steps_in(tmp_path)) == [7, 9, 11]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        *("deep", "step-00000007", "step-00000009", "step-00000011")
    ]
    assert load(tmp_path) == 11


def test_what_is_written_is_a_copy(tmp_path, monkeypatch):
    model, trained_on, write = nn.Linear(30, 20), threading.Event(), BoxPlan.write

    def late(*arguments):
        assert trained_on.wait(10)
        return write(*arguments)

    monkeypatch.setattr(BoxPlan, "write", late)
    with Checkpoints(tmp_path) as checkpoints, torch.no_grad():
        model.weight.fill_(1)
        checkpoints.save(1, model=model)
        model.weight.fill_(2)
        trained_on.set()
    assert load(tmp_path) == 1


FILES = "__0_0.distcp", ".metadata", "manifest.json"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["cut", "flipped", "missing", "empty", "longer"])
def test_a_file_that_is_not_what_it_was(tmp_path, name, how):
    save_steps(tmp_path)
    path = tmp_path / "step-00000002" / name
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 1
    data = {"cut": data[:-1], "empty": b"", "longer": data + b"x"}.get(how, data)
    path.unlink() if how == "missing" else path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"{path}.*go on from {tmp_path}/step-00000001, move it"):
        load(tmp_path)
    shutil.move(tmp_path / "step-00000002", tmp_path / "aside")
    assert load(tmp_path) == 1


def test_every_bit_of_every_file_counts(tmp_path):
    save_steps(tmp_path, [1])
    draw = random.Random(0)
    for name in FILES:
        path = tmp_path / "step-00000001" / name
        data = path.read_bytes()
        for _ in range(40):
            at = draw.randrange(len(data))
            flipped = bytearray(data)
            flipped[at] ^= 1 << draw.randrange(8)
            path.write_bytes(flipped)
            with pytest.raises(ValueError, match=str(path)):
                load(tmp_path)
        path.write_bytes(data)
    assert load(tmp_path) == 1


def test_one_of_several_shards_is_missing_or_changed(pools, tmp_path):
    on_ranks(pools, "fsdp4", tmp_path, 2)
    path = tmp_path / "step-00000002" / "__2_0.distcp"
    data = bytearray(path.read_bytes())
    data[1000] ^= 16
    path.write_bytes(data)
    with pytest.raises(md.RankError, match=f"{path} has changed since it was written"):
        on_ranks(pools, "zero_1", tmp_path, 3)
    path.unlink()
    with pytest.raises(md.RankError, match=f"{path} is missing"):
        on_ranks(pools, "zero_1", tmp_path, 3)
    assert list(commit.steps_in(tmp_path)) == [2]


def test_another_format_and_another_name(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(commit, "FORMAT", 7)
        save_steps(tmp_path, [1])
    with pytest.raises(ValueError, match="manifest.json is of format 7, of a later minidist"):
        load(tmp_path)
    save_steps(tmp_path / "b", [1])
    (tmp_path / "b" / "step-00000001").rename(tmp_path / "b" / "step-00000009")
    with pytest.raises(ValueError, match="step-00000009 is of step 1: somebody has renamed it"):
        load(tmp_path / "b")


OTHERS = {
    "has shape \\(20, 30\\), torch.float32, and the model's has \\(20, 31\\)": nn.Linear(31, 20),
    "torch.float32, and the model's has \\(20, 30\\), torch.float64": nn.Linear(30, 20).double(),
    "it has no 0.weight": nn.Sequential(nn.Linear(30, 20)),
    "it has bias as well": nn.Linear(30, 20, bias=False),
}


@pytest.mark.parametrize("words", OTHERS)
def test_another_model(tmp_path, words):
    save_steps(tmp_path)
    with pytest.raises(
        ValueError, match=f"step-00000002 does not load: it is of .*model: .*{words}"
    ):
        load(tmp_path, OTHERS[words])


def test_another_optimizer_or_data(tmp_path):
    save_steps(tmp_path, [1])
    model = nn.Linear(30, 20)
    two = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 1}], lr=0.1)
    with pytest.raises(ValueError, match="of another optimizer: of 1 groups, and .* has 2"):
        load(tmp_path, model, optimizer=two)
    one = torch.optim.SGD([model.weight], lr=0.1)
    with pytest.raises(ValueError, match="its group 0 has bias, and that of the one here has not"):
        load(tmp_path, model, optimizer=one)
    with Checkpoints(tmp_path / "part") as checkpoints:
        checkpoints.save(1, model=model)
        checkpoints.save(2, model=model, optimizer=one)
    whole = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match="its group 0 has no bias, and that of the one here has[.]"
    ):
        load(tmp_path / "part", model, optimizer=whole)
    shutil.rmtree(tmp_path / "part" / "step-00000002")
    with pytest.raises(ValueError, match="it was saved without an optimizer"):
        load(tmp_path / "part", model, optimizer=whole)
    with pytest.raises(ValueError, match="it has no state of data"):
        load(tmp_path, model, data=Batches(TensorDataset(torch.arange(5)), 2))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="has the option dampening, and .* has amsgrad instead"):
        load(tmp_path, model, optimizer=torch.optim.Adam(model.parameters()))
    strange = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match="not the model's"):
        checkpoints.save(3, model=model, optimizer=strange)
    assert list(commit.steps_in(tmp_path)) == [1, 2]


class Plain:
    """Something with a state: what it is given."""

    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class WithMore(nn.Linear):
    def get_extra_state(self):
        return {"seen": Plain()}


def group_of(value):
    model = nn.Linear(30, 20)
    return model, torch.optim.SGD([{"params": [*model.parameters()], "note": value}], lr=0.1)


STRANGE = {  # saved like this, a checkpoint would never load
    "the state of it has more in it .*: .*Plain": lambda: dict(it=Plain(deep=[{"x": Plain()}])),
    "the state of it cannot be written: .*lambda": lambda: dict(it=Plain(x=lambda: 0)),
    "it has no state_dict.. to save: it is 3": lambda: dict(it=3),
    "model._extra_state has more in it": lambda: dict(model=WithMore(30, 20)),
    "a group of the optimizer has more in it": lambda: dict(
        zip(("model", "optimizer"), group_of(Plain()), strict=True)
    ),
    "step is a whole number, not 2.0": lambda: dict(step=2.0),
    "step is a whole number, not '2'": lambda: dict(step="2"),
}


@pytest.mark.parametrize("words", STRANGE)
def test_steps_and_states_that_cannot_be_saved(tmp_path, words):
    """Also where the step before was fine."""
    model, it = nn.Linear(30, 20), Plain()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, model=model, it=it)
        with pytest.raises(TypeError, match=words):
            checkpoints.save(**dict(step=2, model=model) | STRANGE[words]())
        assert list(commit.steps_in(tmp_path)) == [1] and not list(tmp_path.glob("*.partial"))
        checkpoints.save(torch.tensor(2), model=nn.Linear(30, 20), it=it)
    assert list(commit.steps_in(tmp_path)) == [1, 2]


def test_steps_that_are_not_new_and_keeping_none(tmp_path):
    save_steps(tmp_path)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match="has step 2 already, so step 2 is not new"):
            checkpoints.save(2, model=nn.Linear(30, 20))
        with pytest.raises(ValueError, match="a step is 0 or more, not -1"):
            checkpoints.save(-1, model=nn.Linear(30, 20))
    for keep in 0, 1.5:
        with pytest.raises(ValueError, match="keep must be a whole number, 1 or more"):
            Checkpoints(tmp_path, keep)
    assert load(tmp_path) == 2 and not list(tmp_path.glob("*.partial"))


def later_strange(folder):
    """The state of one rank, from the second save on."""
    it = Plain()
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, model=nn.Linear(2, 2), it=it)
        it.state = {"x": lambda: 0} if dist.get_rank() == 1 else {}
        try:
            checkpoints.save(2, model=nn.Linear(2, 2), it=it)
        except TypeError as error:
            return str(error)


def test_a_state_that_one_rank_cannot_write_is_told_on_every_rank(pools, tmp_path):
    first, second = pools(2)(later_strange, tmp_path)
    assert first == second and first.startswith("rank 1: the state of it cannot be written")


def averaged(folder, until, save=True):
    """Two replicas that meet at every fourth step, saved at the third."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    bare = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = md.averaging.DiLoCo(bare, period=4)
    parts = dict(model=model, replica=model, averaging=optimizer)
    with Checkpoints(folder) as checkpoints:
        begin = checkpoints.load(**parts) or 0
        for step in range(begin, until):
            drawn = torch.Generator().manual_seed(10 * step + dist.get_rank())
            inputs = torch.randn(4, 3, dtype=torch.float64, generator=drawn)
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
        if save:
            checkpoints.save(until, **parts)
            try:
                checkpoints.save(until + 1, model=model, optimizer=optimizer)
            except TypeError as error:
                assert "DiLoCo has more than states of parameters: averaging" in str(error)
            else:
                raise AssertionError("it was saved")
    return whole(model)


def test_replicas_that_differ_go_on_where_each_was(pools, tmp_path):
    wanted = pools(2)(averaged, tmp_path / "a", 6, False)
    at_3 = pools(2)(averaged, tmp_path / "b", 3)
    assert not same(*at_3)
    found = pools(2)(averaged, tmp_path / "b", 6)
    assert all(map(same, found, wanted))


def test_a_second_run_is_refused_by_name(tmp_path):
    with Checkpoints(tmp_path) as first:
        with pytest.raises(RuntimeError, match=f"another run, process {os.getpid()} on "):
            Checkpoints(tmp_path)
        first.save(1, model=nn.Linear(2, 2))
    Checkpoints(tmp_path).close()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(tmp_path, monkeypatch, code):
    def none(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(commit.fcntl, "flock", none)
    with pytest.warns(UserWarning, match=f"{tmp_path} has no locks .*, so a second run"):
        checkpoints = Checkpoints(tmp_path)
    with checkpoints:
        checkpoints.save(1, model=nn.Linear(2, 2))
    assert list(commit.steps_in(tmp_path)) == [1]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_does_not_keep_the_folder_of_a_killed_run(tmp_path):
    first = Checkpoints(tmp_path)
    began, begun = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(begun, b"x")
        time.sleep(60)
        os._exit(0)
    try:
        os.read(began, 1)
        first._lock.forget()  # as the end of a process does
        Checkpoints(tmp_path).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(began)
        os.close(begun)


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Checkpoints(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_folder_without_rights(monkeypatch):
    folder = Path(tempfile.mkdtemp(prefix="rights-"))
    folder.chmod(0o755)
    try:
        save_steps(folder, [1])
        with Checkpoints(folder) as checkpoints:
            os.seteuid(65534)
            try:
                with pytest.raises(OSError, match=f"denied: '{folder}/step-00000002"):
                    checkpoints.save(2, model=nn.Linear(2, 2))
            finally:
                os.seteuid(0)
        os.seteuid(65534)
        try:
            with pytest.raises(OSError, match=f"denied: '{folder}/.lock"):
                Checkpoints(folder)
        finally:
            os.seteuid(0)
        assert load(folder) == 1
    finally:
        shutil.rmtree(folder)


def fill_the_disk(folder, waits):
    """Rank 1 can write no more than 2,000 bytes. What both ranks hear, and what is there then."""
    model, told = nn.Linear(100, 100), []
    model = md.DistributedDataParallel(model)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, model=model)
        checkpoints.wait()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        try:
            checkpoints.save(2, model=model)
            checkpoints.wait() if waits else checkpoints.save(3, model=model)
        except RuntimeError as error:
            told.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        dist.barrier()
        told.append(sorted(path.name for path in folder.iterdir()))
        dist.barrier()
        checkpoints.save(2, model=model)
    return *told, list(commit.steps_in(folder))


@pytest.mark.parametrize("waits", [True, False])
def test_a_full_disk_is_told_on_every_rank(pools, tmp_path, waits):
    first, second = pools(2)(fill_the_disk, tmp_path, waits)
    assert first == second
    words, there, steps = first
    assert words.startswith(f"rank 1: {tmp_path}/step-00000002.")
    assert "could not be written: OSError: [Errno 27] File too large" in words
    assert there == [".lock", "step-00000001"] and steps == [1, 2]


def save_and_fail(folder):
    model = md.DistributedDataParallel(nn.Linear(100, 100))
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, model=model)
        raise KeyError("after the save")


def test_a_save_becomes_whole_though_the_run_fails(pools, monkeypatch, tmp_path):
    monkeypatch.setattr("minidist.runtime.processes.GRACE", 20)  # of a disk that is slow
    with pytest.raises(md.RankError, match="after the save"):
        pools(2)(save_and_fail, tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step-00000001"]
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.load(model=nn.Linear(100, 100)) == 1


UNCLOSED = """
import threading, torch.distributed as dist
from torch import nn
from minidist.saving import Checkpoints, box_plan, writing

def late(*arguments):
    {how}
    return write(*arguments)

def run():
    Checkpoints("run").save(1, model=nn.Linear(100, 100))

dist.init_process_group("gloo", init_method="file://{store}", rank={rank}, world_size={ranks})
writing.AT_EXIT, write, box_plan.BoxPlan.write = {limit}, box_plan.BoxPlan.write, late
run()
"""


@pytest.mark.parametrize(
    ("how", "limit", "ranks", "words"),
    [
        ("threading.Event().wait(0.5)", 100, 2, None),
        ("threading.Event().wait()", 0.1, 1, "was not whole 0.1 seconds after .* and is lost: "),
        ("raise OSError('no room')", 100, 1, "could not be written: OSError: no room. The check"),
    ],
    ids=["becomes whole", "is late", "fails"],
)
def test_the_last_save_of_a_script_that_never_closes(tmp_path, how, limit, ranks, words):
    given = dict(how=how, limit=limit, ranks=ranks, store=tmp_path / "store")
    with contextlib.ExitStack() as block:
        programs = [
            block.enter_context(
                Program(UNCLOSED.format(rank=r, **given), tmp_path, file=tmp_path / f"{r}.py")
            )
            for r in range(ranks)
        ]
        told = [program.finish(120)[2] for program in programs]
    if words is None:
        assert told == ["", ""] and list(commit.steps_in(tmp_path / "run")) == [1]
    else:
        assert re.search(f"RuntimeError: run/step-00000001.*{words}", told[0]), told
        assert not commit.steps_in(tmp_path / "run")


def save_late_and_never_close(folder):
    write = BoxPlan.write

    def late(*arguments):
        threading.Event().wait(0.5)
        return write(*arguments)

    BoxPlan.write = late
    Checkpoints(folder).save(1, model=nn.Linear(2, 2))


def test_the_last_save_of_ranks_that_never_close(tmp_path):
    with md.ranks(2) as pool:
        pool(save_late_and_never_close, tmp_path)
    assert list(commit.steps_in(tmp_path)) == [1]


def different_steps(folder):
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1 + dist.get_rank(), model=nn.Linear(2, 2))


def test_ranks_that_save_different_steps(pools, tmp_path):
    with pytest.raises(md.RankError, match=r"different steps: \[1, 2\]"):
        pools(2)(different_steps, tmp_path)
    assert not list(tmp_path.glob("step*"))


def save_with_a_late_rank(folder):
    """Rank 1 stops for a moment before it opens a folder. Whole steps on rank 0."""
    opened = os.open

    def late(path, *arguments, **options):
        if Path(path).is_dir():
            time.sleep(0.3)
        return opened(path, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch, Checkpoints(folder) as checkpoints:
        if dist.get_rank() == 1:
            patch.setattr(os, "open", late)
        checkpoints.save(1, model=md.DistributedDataParallel(nn.Linear(100, 100)))
        checkpoints.wait()
    return list(commit.steps_in(folder))


def test_a_rank_that_is_late_does_not_look_for_a_folder_that_has_its_name(pools, tmp_path):
    assert pools(2)(save_with_a_late_rank, tmp_path) == [[1], [1]]


def test_an_old_checkpoint_that_cannot_be_deleted_is_no_error_of_the_new_one(tmp_path):
    model = nn.Linear(30, 20)
    save_steps(tmp_path / "a", [1])
    (tmp_path / "a" / "step-00000001").rename(tmp_path / "elsewhere")
    (tmp_path / "a" / "step-00000001").symlink_to(tmp_path / "elsewhere")
    said = pytest.warns(UserWarning, match="step-00000001 could not be deleted: .*symbolic")
    with said, Checkpoints(tmp_path / "a", keep=1) as checkpoints:
        checkpoints.save(2, model=model)
    assert list(commit.steps_in(tmp_path / "a")) == [2]
    assert (tmp_path / "elsewhere" / commit.MANIFEST).exists()


def load_what_one_rank_refuses(folder):
    model = nn.Linear(2, 2)
    theirs = nn.Linear(2, 2) if dist.get_rank() else model
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, model=model)
        try:
            checkpoints.load(model=model, optimizer=adam(theirs.parameters()))
        except ValueError as error:
            return str(error)


def test_what_one_rank_refuses_to_load_is_told_on_every_rank(pools, tmp_path):
    first, second = pools(2)(load_what_one_rank_refuses, tmp_path)
    assert first == second and "rank 1: the optimizer has a parameter that is not" in first


# ---- kill -9 -----------------------------------------------------------------------------------


def digest(model, optimizer):
    found = hashlib.blake2b()
    for parameter in model.parameters():
        states = optimizer.state.get(parameter, {})
        for tensor in (parameter, *(states[key] for key in sorted(states))):
            found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


def grow(folder, steps, saves=True):
    """Train and save at every step, noting with what it began; or just train, and say with what
    each step ended."""
    drawn = torch.Generator().manual_seed(0)
    images = torch.randn(100, 64, dtype=torch.float64, generator=drawn)
    labels = torch.randint(10, (100,), generator=drawn)
    model = md.DistributedDataParallel(md.zoo.mlp(64, 256, 256, 10, dtype=torch.float64))
    optimizer = md.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
    batches = Batches(TensorDataset(images, labels), 16)
    parts = dict(model=model, optimizer=optimizer, data=batches)
    ends = []
    with Checkpoints(folder) as checkpoints:
        begin = checkpoints.load(**parts) or 0
        if begin:
            note = folder.parent / f"began-{dist.get_rank()}"
            with note.open("a") as file:
                file.write(f"{begin} {digest(model, optimizer)}\n")
        for step, (inputs, targets) in zip(range(begin + 1, steps + 1), batches, strict=False):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            if saves:
                checkpoints.save(step, **parts)
            else:
                ends.append(digest(model, optimizer))
    return ends


def kill_in_a_save(folder, victims, moments, stop):
    """Kill these processes within a save, at a random moment of it."""
    seen = set(folder.glob("*.partial"))
    saves = moments.randrange(1, 4)
    while not stop.wait(0.0005):
        new = set(folder.glob("*.partial")) - seen
        seen |= new
        saves -= len(new)
        if saves <= 0:
            break
    time.sleep(moments.uniform(0, 0.06))
    for pid in victims:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=pytest.mark.soak)])
@pytest.mark.timeout(1200)
def test_kills_in_a_save_change_nothing(tmp_path, kills):
    """Of one rank or of all. Each time the newest whole checkpoint loads, and is to the bit where
    an uninterrupted run was at that step; and so is the end."""
    moments, folder = random.Random(SEED), tmp_path / "a"
    folder.mkdir()
    partials = 0
    with md.ranks(2) as pool:
        for _ in range(kills):
            pids = pool(os.getpid)
            victims = moments.choice([pids[:1], pids[1:], pids])
            stop = threading.Event()
            arguments = folder, victims, moments, stop
            killer = threading.Thread(target=kill_in_a_save, args=arguments)
            killer.start()
            try:
                with pytest.raises(md.RankError):
                    pool(grow, folder, 10**6)
            finally:
                stop.set()
                killer.join()
            partials += len(list(folder.glob("*.partial")))
        last = max(commit.steps_in(folder), default=0) + 3
        pool(grow, folder, last)
        pool(grow, folder, last)  # notes the end
        assert max(commit.steps_in(folder)) == last
        wanted = pool(grow, tmp_path / "b", last, False)
    assert partials >= kills // 4  # the kills were where they should be
    for rank in range(2):
        began = [line.split() for line in (tmp_path / f"began-{rank}").read_text().splitlines()]
        assert began[-1][0] == str(last) and len(began) >= kills // 2
        assert all(wanted[rank][int(step) - 1] == found for step, found in began)
    print(f"{kills} kills, {partials} folders left partial, {last} steps")
