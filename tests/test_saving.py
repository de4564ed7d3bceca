"""Checkpoints that survive: every strategy, any world size, kills at any moment, bad files."""

import hashlib
import os
import random
import resource
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from programs import SEED
from torch import nn
from torch.utils.data import TensorDataset

import minidist as md
from minidist.instruments.parity.differences import relative_difference
from minidist.mixed import MixedParallel
from minidist.saving import Batches, Checkpoints, commit, writing
from minidist.saving.parts import Part
from minidist.saving.states import States
from minidist.saving.writing import Writer

# Of a process alone: pytest puts its own filters before the library's.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

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


STRATEGIES = {
    "bare": (1, bare),
    "ddp": (2, ddp),
    "zero_1": (2, zero_1),
    "zero_2": (4, zero_2),
    "fsdp": (2, fsdp),
    "fsdp4": (4, fsdp),
    "in_place": (2, in_place),
    "offload": (2, offload),
    "features": (2, features),
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


@pytest.mark.parametrize(
    "strategy",
    ["zero_2", "fsdp", "features", "mixed", "mixed_zero"],
)
def test_a_run_goes_on_to_the_bit(pools, tmp_path, strategy):
    wanted = on_ranks(pools, strategy, tmp_path / "uninterrupted", 6, save=False)
    on_ranks(pools, strategy, tmp_path / "a", 3)
    found = on_ranks(pools, strategy, tmp_path / "a", 6)
    assert same(found, wanted)


CHAINS = [
    ["bare", "fsdp4", "zero_1", "mixed", "ddp"],
    pytest.param(
        ["mixed_fsdp", "zero_2", "bare", "in_place", "mixed_zero"], marks=pytest.mark.soak
    ),
    ["features", "offload", "fsdp4", "fsdp", "zero_2"],
]


@pytest.mark.parametrize("chain", CHAINS, ids="-".join)
def test_other_strategies_and_world_sizes_go_on(pools, tmp_path, chain):
    wanted = on_ranks(pools, "bare", tmp_path / "uninterrupted", 6, save=False)
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


compiled, ours = partial(torch.compile, backend="eager"), md.DistributedDataParallel
COMPILED = {
    "inside": lambda model: ours(compiled(model)),
    "outside": lambda model: compiled(md.FullyShardedDataParallel(model)),
}


def test_a_compiled_model_has_the_names_of_the_bare_one(pools, tmp_path):
    def go_on(way):
        for step, make in enumerate((ours, COMPILED[way], ours)):
            layer = nn.Linear(4, 4)
            nn.init.constant_(layer.weight, step)
            model = make(nn.Sequential(layer))
            with Checkpoints(tmp_path / way) as checkpoints:
                checkpoints.load(model=model)
                checkpoints.save(step, model=model)
            yield float(next(model.parameters()).sum())

    for way in COMPILED:
        assert pools(2)(lambda way: list(go_on(way)), way) == [[0.0] * 3] * 2, way


def test_random_numbers_schedulers_and_buffers_go_on_on_every_rank(pools, tmp_path):
    wanted = pools(2)(with_random_numbers, tmp_path / "a", 7, False)
    pools(2)(with_random_numbers, tmp_path / "b", 3)
    found = pools(2)(with_random_numbers, tmp_path / "b", 7)
    for ours, theirs in zip(found, wanted, strict=True):
        assert all(torch.equal(ours[0][name], theirs[0][name]) for name in theirs[0])
        assert ours[1] == theirs[1] and torch.equal(ours[2], theirs[2]) and ours[3] == theirs[3]
    assert not torch.equal(found[0][2], found[1][2])
    new = pools(4)(with_random_numbers, tmp_path / "b", 8)  # two ranks more: each has its own
    assert len({float(each[2][0]) for each in new}) == 4


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


# ---- data --------------------------------------------------------------------------------------


def numbers(folder, length, batch, seed, steps, options):
    """Which examples this rank sees, batch by batch; it goes on with a run, and saves it."""
    batches = Batches(TensorDataset(torch.arange(length)), batch, seed, **options)
    with Checkpoints(folder) as checkpoints:
        start = checkpoints.load(model=nn.Linear(1, 1), data=batches) or 0
        found = [own.tolist() for _, (own,) in zip(range(steps), batches, strict=False)]
        checkpoints.save(start + steps, model=nn.Linear(1, 1), data=batches)
    return found


def test_no_example_is_lost_or_repeated_when_the_number_of_ranks_changes(pools, tmp_path):
    seen, batches, ahead = [], [], {"num_workers": 1, "prefetch_factor": 4}
    for ranks, steps, options in (2, 3, {}), (4, 4, {}), (1, 2, ahead), (2, 4, ahead):
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


# ---- parts -------------------------------------------------------------------------------------


def torchs_ddp():
    model = nn.parallel.DistributedDataParallel(transformer())
    return model, adam(model.parameters())


def torchs_fsdp():
    model = torch.distributed.fsdp.fully_shard(transformer())
    return model, adam(model.parameters())


STRATEGIES |= {"torch's ddp": (2, torchs_ddp), "torch's fsdp": (2, torchs_fsdp)}
ONCE = "fsdp4", "in_place", "torch's fsdp", "mixed_fsdp"  # no element is on two ranks, but along
# `tensor` what is replicated


def states_after(make, steps):
    """Model and optimizer states, whole; and how many elements of each entry this rank has."""
    model, optimizer = make()
    train(model, optimizer, data_of(model), steps)
    states = States(model, optimizer)
    parts = states.of_model() | states.of_optimizer()

    own = {
        name: (part.shape, part.dtype, part.pieces)
        for name, part in parts.items()
        if isinstance(part, Part)
    }
    everyone = [own]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
    full = {}
    for each in everyone:
        for name, (shape, dtype, pieces) in each.items():
            whole = full.setdefault(name, torch.empty(shape, dtype=dtype))
            for at, x in pieces.items():
                whole[tuple(slice(o, o + n) for o, n in zip(at, x.shape, strict=True))] = x
    counts = {name: sum(x.numel() for x in pieces.values()) for name, (*_, pieces) in own.items()}
    return full, counts


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_parts_of_all_ranks_are_what_one_process_has(pools, strategy):
    wanted = states_after(bare, 2)[0]
    ranks, make = STRATEGIES[strategy]
    found = pools(ranks)(states_after, make, 2)
    whole, counts = found[0][0], [each for _, each in found]
    assert whole.keys() == wanted.keys()
    assert all(whole[name].shape == wanted[name].shape for name in wanted)
    assert max(relative_difference(whole[name], wanted[name]) for name in wanted) < 1e-12
    if strategy in ONCE:
        name = "optimizer.exp_avg.blocks.1.qkv.weight"
        assert sum(each.get(name, 0) for each in counts) == wanted[name].numel()
        assert all(each.get(name, 0) < wanted[name].numel() for each in counts)


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


def open_and_close(folder):
    Checkpoints(folder).close()


def test_a_second_run_is_refused(pools, tmp_path):
    with Checkpoints(tmp_path) as first:
        with pytest.raises(md.RankError, match="belongs to another run"):
            pools(2)(open_and_close, tmp_path)
        first.save(1, model=nn.Linear(2, 2))
    pools(2)(open_and_close, tmp_path)
    open_and_close(tmp_path)


def test_the_newest_stay_and_the_first_run_begins_with_none(tmp_path):
    assert load(tmp_path / "deep" / "a") is None
    save_steps(tmp_path, range(5, 12, 2), keep=3)
    assert list(commit.steps_in(tmp_path)) == [7, 9, 11]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        *("deep", "step-00000007", "step-00000009", "step-00000011")
    ]
    assert load(tmp_path) == 11


def test_what_is_written_is_a_copy(tmp_path, monkeypatch):
    model, trained_on, write = nn.Linear(30, 20), threading.Event(), Writer.write_data

    def late(*arguments):
        assert trained_on.wait(10)
        return write(*arguments)

    monkeypatch.setattr(Writer, "write_data", late)
    with Checkpoints(tmp_path) as checkpoints, torch.no_grad():
        model.weight.fill_(1)
        checkpoints.save(1, model=model)
        model.weight.fill_(2)
        trained_on.set()
    assert load(tmp_path) == 1


FILES = "__0_0.distcp", ".metadata", "manifest.json"


def test_a_file_that_is_not_what_it_was(tmp_path):
    """It is shorter, or empty, or longer, or any one of its bits is another."""
    save_steps(tmp_path)
    draw, older = random.Random(0), f"go on from {tmp_path}/step-00000001, move it"
    for name in FILES:
        path = tmp_path / "step-00000002" / name
        data = path.read_bytes()
        for case in ("cut", "empty", "longer", *range(20)):
            flipped, at = bytearray(data), draw.randrange(len(data))
            flipped[at] ^= 1 << draw.randrange(8)
            path.write_bytes(dict(cut=data[:-1], empty=b"", longer=data + b"x").get(case, flipped))
            with pytest.raises(ValueError, match=rf"{path}.*{older}"):
                load(tmp_path)
                pytest.fail(f"{name}, {case}")
        path.unlink()
        with pytest.raises(ValueError, match=rf"{path}.*{older}"):
            load(tmp_path)
        path.write_bytes(data)
    assert load(tmp_path) == 2
    shutil.move(tmp_path / "step-00000002", tmp_path / "aside")
    assert load(tmp_path) == 1


def test_another_format_and_another_name(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(commit, "FORMAT", 7)
        save_steps(tmp_path, [1])
    with pytest.raises(ValueError, match="manifest.json is of format 7, and this minidist reads 2"):
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


def test_another_model(tmp_path):
    save_steps(tmp_path)
    for words, model in OTHERS.items():
        said = f"step-00000002 does not load: it is of .*model: .*{words}"
        with pytest.raises(ValueError, match=said):
            load(tmp_path, model)


def test_another_optimizer_or_data(tmp_path):
    save_steps(tmp_path, [1])
    model = nn.Linear(30, 20)
    two = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 1}], lr=0.1)
    with pytest.raises(ValueError, match="of another optimizer: of 1 groups, and .* has 2"):
        load(tmp_path, model, optimizer=two)
    one = torch.optim.SGD([model.weight], lr=0.1)
    with pytest.raises(ValueError, match="only one of them has bias in group 0"):
        load(tmp_path, model, optimizer=one)
    with pytest.raises(ValueError, match="of another optimizer, with dampening, and without amsgr"):
        load(tmp_path, model, optimizer=torch.optim.Adam(model.parameters()))
    with pytest.raises(ValueError, match="it has no state of data"):
        load(tmp_path, model, data=Batches(TensorDataset(torch.arange(5)), 2))
    with Checkpoints(tmp_path / "part") as checkpoints:
        checkpoints.save(1, model=model)
    with pytest.raises(ValueError, match="it was saved without an optimizer"):
        load(tmp_path / "part", model, optimizer=one)
    strange = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match="not the model's"):
        checkpoints.save(3, model=model, optimizer=strange)
    assert list(commit.steps_in(tmp_path)) == [1]


class Plain:
    """Something with a state: what it is given."""

    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Counts(nn.Linear):
    def get_extra_state(self):
        return 1


STRANGE = {  # saved like this, a checkpoint would never load
    "the state of it has more in it than tensors": lambda: dict(it=Plain(deep=[{"x": Plain()}])),
    "of it has more in it than tensors": lambda: dict(it=Plain(x=lambda: 0)),
    "_extra_state of the model is neither": lambda: dict(model=Counts(30, 20)),
    "it has no state_dict.. to save: it is 3": lambda: dict(it=3),
    "'float' object cannot be interpreted as an integer": lambda: dict(step=2.0),
}


def test_steps_and_states_that_cannot_be_saved(tmp_path):
    """Also where the step before was fine."""
    model, it = nn.Linear(30, 20), Plain()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, model=model, it=it)
        for words, wrong in STRANGE.items():
            with pytest.raises(TypeError, match=words):
                checkpoints.save(**dict(step=2, model=model) | wrong())
            assert list(commit.steps_in(tmp_path)) == [1] and not list(tmp_path.glob("*.partial"))
        checkpoints.save(torch.tensor(2), model=nn.Linear(30, 20), it=it)
    assert list(commit.steps_in(tmp_path)) == [1, 2]


def test_steps_that_are_not_new_and_keeping_none(tmp_path):
    save_steps(tmp_path)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match="step 2 is not new: .* has step 2 already"):
            checkpoints.save(2, model=nn.Linear(30, 20))
        with pytest.raises(ValueError, match="step -1 is not new"):
            checkpoints.save(-1, model=nn.Linear(30, 20))
    for keep in 0, -1:
        with pytest.raises(ValueError, match="keep must be 1 or more"):
            Checkpoints(tmp_path, keep)
    assert load(tmp_path) == 2 and not list(tmp_path.glob("*.partial"))


def fill_the_disk(folder):
    """Rank 1 can write no more than 2,000 bytes. What both ranks hear, and what is there then."""
    model, told = nn.Linear(100, 100), []
    model = md.DistributedDataParallel(model)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, model=model)
        checkpoints.wait()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        checkpoints.save(2, model=model)
        try:
            checkpoints.save(3, model=model)
        except RuntimeError as error:
            told.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        dist.barrier()
        told.append(sorted(path.name for path in folder.iterdir()))
        dist.barrier()
        checkpoints.save(2, model=model)
    return *told, list(commit.steps_in(folder))


def test_a_full_disk_is_told_on_every_rank(pools, tmp_path):
    first, second = pools(2)(fill_the_disk, tmp_path)
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
    monkeypatch.setattr("minidist.machine.runtime.processes.GRACE", 20)  # of a disk that is slow
    with pytest.raises(md.RankError, match="after the save"):
        pools(2)(save_and_fail, tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step-00000001"]
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.load(model=nn.Linear(100, 100)) == 1


def different_steps(folder):
    model = nn.Linear(2, 2)
    with Checkpoints(folder) as checkpoints:
        with pytest.raises(ValueError, match=r"different steps: \[1, 2\]"):
            checkpoints.save(1 + dist.get_rank(), model=model)
        checkpoints.save(1, model=model)  # all of it, though nothing is new since
        return checkpoints.load(model=model)


def test_ranks_that_save_different_steps(pools, tmp_path):
    assert pools(2)(different_steps, tmp_path) == [1, 1]


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


def grow(folder, steps, saves=True, die=None):
    """Train and save at every step, noting with what it began; or just train, and say with what
    each step ended. Or be killed within a save, at a place of PLACES."""
    drawn = torch.Generator().manual_seed(0)
    images = torch.randn(100, 64, dtype=torch.float64, generator=drawn)
    labels = torch.randint(10, (100,), generator=drawn)
    model = md.DistributedDataParallel(md.zoo.mlp(64, 256, 256, 10, dtype=torch.float64))
    optimizer = md.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
    batches = Batches(TensorDataset(images, labels), 16)
    parts = dict(model=model, optimizer=optimizer, data=batches)
    ends = []
    if die is not None and dist.get_rank() == PLACES[die][0]:
        die_in_the_third_call(*PLACES[die][1:3])
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


def all_began_where_a_run_without_kills_was(pool, folder, last):
    """Each checkpoint that was loaded is to the bit where an uninterrupted run was at that step;
    and so is the end. How many there were."""
    wanted = pool(grow, folder.parent / "b", last, False)
    for rank in range(2):
        notes = (folder.parent / f"began-{rank}").read_text().splitlines()
        began = [line.split() for line in notes]
        assert began[-1][0] == str(last)
        assert all(wanted[rank][int(step) - 1] == found for step, found in began)
    return len(began)


PLACES = {  # which rank is killed, in the third call of what, and how many saves are whole then
    "before a rank's note": (1, writing, "sync", 2),
    "before the manifest": (0, commit, "write_whole", 2),
    "before the folder has its name": (0, Path, "rename", 1),  # a save renames an old one too
    "before the old one goes": (0, commit, "clear", 3),
}


def die_in_the_third_call(owner, name):
    function, calls = getattr(owner, name), []

    def call(*arguments, **options):
        calls.append(name)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    setattr(owner, name, call)


def test_a_kill_at_each_place_of_a_save_changes_nothing(tmp_path):
    folder, newest = tmp_path / "a", 0
    folder.mkdir()
    with md.ranks(2) as pool:
        for place, (*_, whole_ones) in PLACES.items():
            with pytest.raises(md.RankError, match="SIGKILL"):
                pool(grow, folder, 10**6, die=place)
            newest += whole_ones
            assert max(commit.steps_in(folder)) == newest, place
        pool(grow, folder, newest + 1)
        pool(grow, folder, newest + 1)  # notes the end
        assert not list(folder.glob("*.partial"))
        assert all_began_where_a_run_without_kills_was(pool, folder, newest + 1) == len(PLACES) + 1


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


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_hundred_kills_in_a_save_change_nothing(tmp_path):
    """Of one rank or of all, at random moments."""
    moments, folder, kills, partials = random.Random(SEED), tmp_path / "a", 100, 0
    folder.mkdir()
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
        began = all_began_where_a_run_without_kills_was(pool, folder, last)
    assert partials >= kills // 4 and began >= kills // 2  # the kills were where they should be
    print(f"{kills} kills, {partials} folders left partial, {last} steps")
