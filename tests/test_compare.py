"""`python -m minidist compare`: every way to train is held against one process, and no fault of one
keeps the others from their rows."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import matplotlib
import pytest
import torch
import torch.distributed as dist
from torch import nn

import minidist as md
from minidist import __main__, compare
from minidist.compare import RefusedError, Row, System, bare, replicas, systems, table
from minidist.compare.model_parts import shape_of
from minidist.compare.results import record, rows_of
from minidist.compare.task import Task
from minidist.compare.watched_steps import HOST, Watch, sent

matplotlib.use("Agg")

OURS = [system.name for system in systems() if not system.peer]
TORCHS = [system.name for system in systems() if system.name.startswith("torch")]


def untied(length, layers=4):
    model = md.zoo.Transformer(256, length, 16, 4, layers)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def tiny():
    """Of the text: bytes (B, 64) to logits (B, 64, 256)."""
    return untied(64)


@pytest.fixture(scope="module")
def rows():
    """By name: all of minidist and of torch, on four ranks."""
    found = compare.run(4, only=OURS + TORCHS, model=tiny, steps=1)
    assert [row.name for row in found] == OURS + TORCHS
    return {row.name: row for row in found}


# ---- the rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS + TORCHS)
def test_a_system_trains_as_one_process_does(rows, name):
    row = rows[name]
    assert row.problem == "" and row.exact == "float64" and row.difference < 1e-12
    assert math.isclose(row.loss, rows["one process"].loss, rel_tol=1e-5)
    assert 0 < row.seconds < 60 and row.peer == (name in TORCHS)


@pytest.mark.parametrize("name", [name for name in OURS + TORCHS if name != "DP"])
def test_memory_by_category(rows, name):
    """Parameters and Adam's states in float32: of a stage, a shard, or the whole."""
    parameters = 4 * sum(p.numel() for p in tiny().parameters())
    held = rows[name].memory
    assert rows[name].peak == sum(held.values()) - held.get(HOST, 0)
    assert held["activations"] > 0
    if "offload" in name:  # states, and a copy of each shard
        assert "optimizer states" not in held and 3 / 4 * parameters <= held[HOST] < parameters
        return
    shared = {"one process": 1, "DDP": 1, "torch DDP": 1, "mixed": 2}.get(name, 4)
    assert held["optimizer states"] == pytest.approx(2 * parameters / shared, rel=0.35)
    assert HOST not in held


def test_savers_save(rows):
    order = ["one process", "DDP", "ZeRO-1", "ZeRO-2", "FSDP", "FSDP + checkpointing"]
    peaks = [rows[name].peak for name in order]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks)
    assert rows["FSDP + offload"].peak < rows["FSDP"].peak
    assert rows["DP"].memory == {} and "threads" in rows["DP"].note


def test_bytes_are_the_planners(rows):
    """Exactly, but for what ranks tell each other: a flag for each tensor says who has a gradient;
    those of a pipeline, or of a mesh, agree on the batch, and add up the loss."""
    stages = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "FSDP": 3}
    stages |= {"FSDP + checkpointing": 3, "FSDP + offload": 3, "torch DDP": 0, "torch ZeRO-1": 1}
    size, tensors = sum(p.numel() for p in tiny().parameters()), len(list(tiny().parameters()))
    for name, stage in stages.items():
        planned = md.planner.traffic(size, 4, stage, precision="float32")
        flags = 2 * 3 / 4 * tensors if stage >= 2 else 0
        assert rows[name].planned == planned > 0
        assert rows[name].sent == pytest.approx(planned + flags, rel=1e-12), name
    for name in "torch FSDP1", "torch FSDP2":  # they keep the last unit from forward to backward
        assert 0.7 * rows[name].planned < rows[name].sent < rows[name].planned
    assert rows["one process"].sent == rows["DP"].sent == 0
    # The planner's layers have biases of queries, keys and values. torch tells no words or digests.
    biases = 4 * 4 * 3 * 16 / 2 * (2 * 1 / 2)  # float32, layers, width; tensor 2, data 2
    more = {"pipeline": 72, "torch pipeline": 0, "tensor": 0, "torch tensor": -36}
    more["mixed"] = 112 - biases
    for name, apart in more.items():
        assert rows[name].sent - rows[name].planned == pytest.approx(apart, abs=1e-6), name
    planned = {row.name for row in rows.values() if row.planned}
    assert planned == {*stages, *more, "torch FSDP1", "torch FSDP2"}


def test_bytes_of_a_collective_are_this_ranks_part(pools):
    def count():
        with md.measure.TrafficCounter() as traffic:
            for root in range(dist.get_world_size()):
                dist.broadcast(torch.ones(100), root)
            dist.all_reduce(torch.ones(400))
        return sent(traffic)

    assert pools(4)(count) == [4 * 400 * 3 / 4 + 2 * 1600 * 3 / 4] * 4


# ---- what cannot be, and what fails ------------------------------------------------------------


class Bare(nn.Module):
    """Neither a sequence nor blocks, and no plan."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, x):
        return self.b(self.a(x).relu())


def wrong(task, watch):
    """Ranks do not average."""
    model = task.make()
    return replicas(task, watch, model, task.optimizer(model.parameters()))


def broken(task, watch):
    if dist.get_rank() == 1:
        raise RuntimeError("a fault of rank 1")
    dist.barrier()


def partly(task, watch):
    state = wrong(task, watch)
    state.pop("b.bias")
    return state


def silent(task, watch):
    return bare(task.make().state_dict())


def nan(task, watch):
    return {name: value * math.nan for name, value in wrong(task, watch).items()}


def single(task, watch):
    """Has no float64."""
    assert task.dtype == torch.float32
    model = md.DistributedDataParallel(task.make())
    return replicas(task, watch, model, task.optimizer(model.parameters()))


def loops(task, watch):
    """A loop that calls back, and losses on one rank."""
    model = md.DistributedDataParallel(task.make())
    optimizer = task.optimizer(model.parameters())
    for batch in task.batches():
        inputs, targets = task.share(batch)
        step = watch.step(model, optimizer)
        step.__enter__()
        optimizer.zero_grad()
        loss = task.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        step.__exit__(None, None, None)
        dist.all_reduce(loss := loss.detach().clone())
        if dist.get_rank() == 0:
            watch.loss(loss / dist.get_world_size())
    watch.note = "its own loop"
    return bare(model.state_dict())


STRANGE = {
    "wrong": wrong,
    "broken": broken,
    "partly": partly,
    "silent": silent,
    "nan": nan,
    "single": partial(single),
    "loops": loops,
}


@pytest.fixture
def strange(monkeypatch):
    """Systems of another room, by the seam."""
    from minidist.compare import tool_systems

    made = [
        System(name, train, peer=True, float64=name != "single") for name, train in STRANGE.items()
    ]
    made.append(System("absent", wrong, peer=True, needs=("torch", "no_such_package")))
    monkeypatch.setattr(tool_systems, "SYSTEMS", made)
    return [system.name for system in made]


def test_a_system_that_fails_is_a_row(strange):
    names = ["DDP", *strange]
    found = compare.run(2, only=names, model=Bare, data="digits", steps=1)
    problems = {row.name: row.problem for row in found}
    assert list(problems) == names  # all others went on
    assert problems["absent"] == ('not installed: no_such_package; pip install "minidist[tools]"')
    assert problems["broken"] == "failed: rank 1 raised RuntimeError: a fault of rank 1"
    assert problems["partly"] == "failed: no rank returns b.bias"
    assert problems["silent"].startswith("failed: it says nothing of its steps")
    rows = {row.name: row for row in found if not row.problem}
    assert rows.keys() == {"DDP", "wrong", "nan", "single", "loops"}
    assert rows["DDP"].difference < 1e-12 and rows["loops"].difference < 1e-12
    assert 1e-3 < rows["wrong"].difference < 10 and rows["nan"].difference == math.inf
    assert 1e-9 < rows["single"].difference < 1e-5 and rows["single"].exact == "float32"
    assert rows["loops"].note == "its own loop" and rows["loops"].memory["gradients"] > 0
    text = table(found)
    assert "broken: failed: rank 1 raised" in text and "(float32)" in text and "nan" in text


def test_a_model_that_a_strategy_cannot_take():
    names = ["DDP", "FSDP + checkpointing", "pipeline", "tensor", "mixed"]
    names += ["torch pipeline", "torch tensor", "torch FSDP2"]
    found = compare.run(2, only=names, model=Bare, data="digits", steps=1)
    problems = {row.name: row.problem for row in found}
    told = {
        "FSDP + checkpointing": "has no blocks",
        "pipeline": "a model whose sequential() gives one, not a Bare",
        "tensor": "nothing says how a Bare is split by features",
        "mixed": "two axes need an even number of ranks",
        "torch pipeline": "not a Bare",
        "torch tensor": "tensor_plan",
    }
    for name, words in told.items():
        assert problems[name].startswith("cannot take the model: ") and words in problems[name]
    assert problems["DDP"] == problems["torch FSDP2"] == ""


def test_what_dropout_draws_is_the_same_in_every_training_by_one_process():
    def dropped():
        return nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10))

    before = torch.get_rng_state()
    alone, ddp = compare.run(2, only=["one process", "DDP"], model=dropped, data="digits", steps=1)
    assert alone.difference < 1e-12 and 1e-3 < ddp.difference < 10
    assert torch.equal(torch.get_rng_state(), before)


def test_what_three_ranks_cannot_share():
    names = ["DDP", "torch pipeline", "tensor", "torch tensor"]
    found = {row.name: row for row in compare.run(3, only=names, model=tiny, steps=1)}
    for name in names[:2]:
        assert found[name].problem == "" and found[name].difference < 1e-12
    for name in names[2:]:
        assert found[name].problem.startswith("cannot take the model")
        assert "3 ranks" in found[name].problem and "4" in found[name].problem


def test_a_model_of_ones_own_may_be_tied():
    tied = partial(md.zoo.Transformer, 256, 64, 16, 2, 2)
    found = compare.run(2, only=["pipeline", "tensor", "torch pipeline"], model=tied, steps=1)
    assert all(row.difference < 1e-12 for row in found[:2])
    assert "cannot tie parameters of two stages" in found[2].problem


def test_digits_are_for_all():
    found = compare.run(2, only=["tensor", "torch tensor", "pipeline"], data="digits", steps=1)
    assert [row.problem for row in found] == [""] * 3
    assert all(row.difference < 1e-12 for row in found)


class Frozen(Bare):
    """Half of it is not trained."""

    def __init__(self):
        super().__init__()
        self.a.requires_grad_(False)


def with_two_heads(model):
    model.head = nn.Sequential(model.head, nn.Linear(256, 256))
    return model


def with_a_wider_block(model):
    model.blocks[0].mlp = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 16))
    return model


def with_a_plan(model):
    model.tensor_plan = {}
    return model


OTHERS = {
    "tied": lambda: md.zoo.Transformer(256, 64, 16, 4, 4),
    "for longer rows": lambda: untied(128),
    "without blocks": lambda: untied(64, layers=0),
    "two heads": lambda: with_two_heads(tiny()),
    "a wider block": lambda: with_a_wider_block(tiny()),
    "its own plan": lambda: with_a_plan(tiny()),
    "another class": lambda: md.zoo.mlp(64, 32, 10),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_the_planner_knows_one_model_only(make):
    assert shape_of(tiny()) == md.planner.Transformer(4, 16, 4, 64, 256, tied=False)
    assert shape_of(make()) is None


def test_the_planner_has_no_bytes_of_a_model_that_is_partly_frozen():
    found = compare.run(2, only=["DDP", "FSDP"], model=Frozen, data="digits", steps=1)
    assert [row.planned for row in found] == [None, None]
    assert all(row.sent > 0 and row.difference < 1e-12 for row in found)


def test_on_gloo_and_on_a_link():
    found = compare.run(
        2, only=["DDP", "torch DDP"], model=Bare, data="digits", steps=1, backend="gloo"
    )
    ours, torchs = found
    assert ours.sent == ours.planned and torchs.sent is None  # torch's calls are in C++
    slow = md.Link(gbps=1, latency_us=20_000)
    names = ["one process", "DDP"]
    alone, ddp = compare.run(2, only=names, model=Bare, data="digits", steps=3, link=slow)
    assert alone.problem == ddp.problem == ""
    assert ddp.seconds > 0.02 and ddp.difference < 1e-12


def test_arguments_that_make_no_sense(strange):
    known = ", ".join(OURS + TORCHS + strange)
    with pytest.raises(
        ValueError, match=f"there is no system FDSP; there are {known}".replace("+", r"\+")
    ):
        compare.run(2, only=["DDP", "FDSP"])
    with pytest.raises(ValueError, match="needs 1 rank and 1 step, or more, not 0 and 10"):
        compare.run(0)
    with pytest.raises(ValueError, match="needs 1 rank and 1 step, or more, not 2 and 0"):
        compare.run(2, steps=0)
    with pytest.raises(ValueError, match="there is no data 'cats'; there are text, digits"):
        compare.run(2, data="cats")
    with pytest.raises(ValueError, match="the model does not train in one process: "):
        compare.run(2, model=Bare, data="text")


def test_systems_are_named_once():
    names = [system.name for system in systems()]
    assert len(names) == len(set(names)) and names[0] == "one process"
    assert all(system.install for system in systems() if system.needs)


# ---- the task ----------------------------------------------------------------------------------


def test_the_task_is_the_same_at_every_call():
    task = Task(tiny, rows=8, steps=2)
    one, other = task.make().state_dict(), task.make().state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    (inputs, targets), second = task.batches()
    assert inputs.shape == targets.shape == (8, 64) and not torch.equal(inputs, second[0])
    images, _ = Task(Bare, "digits", rows=8, steps=1).batches()[0]
    assert images.shape == (8, 64) and images.dtype == torch.float64
    assert task.share((inputs, targets))[0] is inputs  # one process
    adam = replace(task, optimizer_class=torch.optim.Adam, options=dict(lr=0.5))
    assert adam.optimizer(task.make().parameters()).defaults["lr"] == 0.5


def test_a_step_that_fails_is_told(pools):
    watch, model = Watch(), Bare()
    with pytest.raises(ZeroDivisionError), watch.step(model):
        raise ZeroDivisionError
    assert watch.seconds == [] and watch.losses == []


# ---- what is written ---------------------------------------------------------------------------


def test_table_json_and_picture(rows, tmp_path):
    again = rows_of(json.loads(json.dumps(record(list(rows.values())))))
    assert again == list(rows.values())
    lines = table(again).splitlines()
    assert len(lines[0]) == len(lines[1]) and lines[1].startswith("one process")
    assert "  mixed: data 2 × tensor 2" in lines
    assert any("more on the host" in line for line in lines)
    figure = compare.draw(again + [Row("absent", problem="not installed: x")])
    left, middle, right = figure.axes
    assert [label.get_text() for label in left.get_yticklabels()] == list(rows)
    assert [bar.get_width() for bar in middle.patches] == [row.seconds for row in again]
    drawn = sum(bar.get_width() for bar in right.patches)
    assert drawn == sum(sum(row.memory.values()) for row in again)
    assert "in float64" in figure.get_suptitle()
    matplotlib.pyplot.close(figure)
    with pytest.raises(ValueError, match="nothing to draw"):
        compare.draw([Row("absent", problem="not installed: x")])


MODEL = """
from torch import nn
def build():
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
three = 3
def none():
    return None
"""


def test_the_command(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    command = [sys.executable, "-m", "minidist", "compare", "--world-size", "2", "--steps", "1"]
    command += ["--only", "DDP", "pipeline", "tensor", "--data", "digits"]
    command += ["--model", "mine.py:build", "--json", "found.json"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert "3/3" in ran.stderr and "tensor: cannot take the model: " in ran.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["world_size"] == 2 and found["machine"]["torch"] == torch.__version__
    assert [row.name for row in rows_of(found["rows"])] == ["DDP", "pipeline", "tensor"]
    assert {path.name for path in tmp_path.iterdir()} == {"mine.py", "found.json", "compare.png"}


REFUSED = {
    "--only FDSP": "there is no system FDSP; there are one process, DP, DDP,",
    "--world-size 0": "needs 1 rank and 1 step, or more, not 0 and",
    "--steps -1": "needs 1 rank and 1 step, or more, not 4 and -1",
    "--link 0": "a link has more than 0 Gb/s",
    "--link 1 2 3": "--link takes gigabits a second",
    "--link 1 --backend gloo": 'only backend "shm" emulates a link',
    "--backend nonsense": "there is no backend 'nonsense'",
    "--data cats": "invalid choice: 'cats'",
    "--model nowhere.py:build": "there is no file",
    "--model mine.py": "a model is FILE.py:FUNCTION, not mine.py",
    "--model mine.py:nothing": "has no function 'nothing'",
    "--model mine.py:three": "has no function 'three'",
    "--model mine.py:none": "gives no module",
    "--model bad.py:build": "cannot be read: NameError: name 'nonsense' is not defined",
    "--out nowhere/c.png": "no file can be written there",
    "--json .": "no file can be written there",
}


@pytest.mark.parametrize("options", REFUSED)
def test_options_that_make_no_sense(options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "bad.py").write_text("nonsense")
    only = [] if "--only" in options else ["--only", "one process", "DDP"]
    monkeypatch.setattr(sys, "argv", ["minidist", "compare", *options.split(), *only])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and REFUSED[options] in said, said
    assert {path.name for path in tmp_path.iterdir()} == {"mine.py", "bad.py"}


def test_a_refusal_is_a_valueerror():
    assert issubclass(RefusedError, ValueError)
    assert Path(compare.__file__).parent.name == "compare"
