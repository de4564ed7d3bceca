"""`python -m minidist compare`: every way to train is held against one process, and no fault of one
keeps the others from their rows."""

import json
import math
import os
import signal
import sys
from dataclasses import replace

import matplotlib
import pytest
import torch
import torch.distributed as dist
from torch import nn

import minidist as md
from minidist import __main__
from minidist.instruments import compare
from minidist.instruments.compare import Row, System, replicas, systems, table
from minidist.instruments.compare.model_parts import shape_of
from minidist.instruments.compare.results import record, rows_of
from minidist.instruments.compare.task import Task
from minidist.instruments.compare.watched_steps import HOST, sent

matplotlib.use("Agg")

OURS = [system.name for system in systems() if not system.peer]
TORCHS = [system.name for system in systems() if system.name.startswith("torch")]
FEW = ["one process", "DDP", "ZeRO-2", "FSDP", "tensor"]  # by day
soak = pytest.mark.soak


def untied(length, layers=4):
    model = md.zoo.Transformer(256, length, 16, 4, layers)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def tiny():
    """Of the text: bytes (B, 64) to logits (B, 64, 256)."""
    return untied(64)


@pytest.fixture(
    scope="module", params=[pytest.param(FEW, id="few"), pytest.param(OURS + TORCHS, marks=soak)]
)
def rows(request):
    """By name: at night all of minidist and of torch, on four ranks; by day a few, on two."""
    found = compare.run(ranks_of(request.param), only=request.param, model=tiny, steps=1)
    assert [row.name for row in found] == request.param
    return {row.name: row for row in found}


def ranks_of(rows):
    return 4 if "mixed" in rows else 2


# ---- the rows ----------------------------------------------------------------------------------


def test_every_system_trains_as_one_process_does(rows):
    for name, row in rows.items():
        assert row.problem == "" and row.exact == "float64" and row.difference < 1e-12, row
        assert math.isclose(row.loss, rows["one process"].loss, rel_tol=1e-5), name
        assert row.seconds > 0 and row.peer == (name in TORCHS), name


def test_memory_by_category(rows):
    """Parameters and Adam's states in float32: of a stage, a shard, or the whole. Who saves more
    has a lower peak."""
    parameters = 4 * sum(p.numel() for p in tiny().parameters())
    for name, row in rows.items():
        held = row.memory
        if name == "DP":
            assert held == {} and "threads" in row.note
            continue
        assert row.peak == sum(held.values()) - held.get(HOST, 0), name
        assert held["activations"] > 0, name
        if "offload" in name:  # states, and a copy of each shard
            assert "optimizer states" not in held and 3 / 4 * parameters <= held[HOST] < parameters
            assert row.peak < rows["FSDP"].peak
            continue
        shared = {"one process": 1, "DDP": 1, "torch DDP": 1, "mixed": 2}.get(name, ranks_of(rows))
        assert held["optimizer states"] == pytest.approx(2 * parameters / shared, rel=0.35), name
        assert HOST not in held, name
    order = ["one process", "DDP", "ZeRO-1", "ZeRO-2", "FSDP", "FSDP + checkpointing"]
    peaks = [rows[name].peak for name in order if name in rows]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks)


def test_bytes_are_the_planners(rows):
    """Exactly, but for what ranks tell each other: of FSDP a flag for each tensor says who has a
    gradient; those of a pipeline, or of a mesh, agree on the batch, and add up the loss."""
    N = ranks_of(rows)
    stages = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "FSDP": 3}
    stages |= {"FSDP + checkpointing": 3, "FSDP + offload": 3, "torch DDP": 0, "torch ZeRO-1": 1}
    size, tensors = sum(p.numel() for p in tiny().parameters()), len(list(tiny().parameters()))
    for name, stage in ((name, stage) for name, stage in stages.items() if name in rows):
        planned = md.planner.traffic(size, N, stage, precision="float32")
        flags = 2 * (N - 1) / N * tensors if stage == 3 else 0
        assert rows[name].planned == planned > 0
        assert rows[name].sent == pytest.approx(planned + flags, rel=1e-12), name
    for name in {"torch FSDP1", "torch FSDP2"} & rows.keys():
        # They keep the last unit from forward to backward.
        assert 0.7 * rows[name].planned < rows[name].sent < rows[name].planned
    assert all(rows[name].sent == 0 for name in {"one process", "DP"} & rows.keys())
    # The planner's layers have biases of queries, keys and values. torch tells no words or digests.
    biases = 4 * 4 * 3 * 16 / 2 * (2 * 1 / 2)  # float32, layers, width; tensor 2, data 2
    more = {"pipeline": 72, "torch pipeline": 0, "tensor": 0, "torch tensor": -36}
    more["mixed"] = 112 - biases
    for name, apart in ((name, apart) for name, apart in more.items() if name in rows):
        assert rows[name].sent - rows[name].planned == pytest.approx(apart, abs=1e-6), name
    planned = {row.name for row in rows.values() if row.planned}
    assert planned == {*stages, *more, "torch FSDP1", "torch FSDP2"} & rows.keys()


def test_bytes_of_a_collective_are_this_ranks_part(pools):
    def count():
        with md.measure.TrafficCounter() as traffic:
            for root in range(dist.get_world_size()):
                dist.broadcast(torch.ones(100), root)
            dist.all_reduce(torch.ones(400))
        return sent(traffic)

    assert pools(2)(count) == [2 * 400 / 2 + 2 * 1600 / 2] * 2


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


def killed(task, watch):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.fixture
def strange(monkeypatch):
    """Systems of another room, by the seam."""
    from minidist.instruments.compare import tool_systems

    made = [System(train.__name__, train, peer=True) for train in (wrong, broken, killed)]
    made.append(System("absent", wrong, peer=True, needs=("torch", "no_such_package")))
    monkeypatch.setattr(tool_systems, "SYSTEMS", made)
    return [system.name for system in made]


def test_a_system_that_fails_is_a_row(strange):
    names = ["DDP", *strange]
    found = compare.run(2, only=names, model=Bare, data="digits", steps=1)
    problems = {row.name: row.problem for row in found}
    assert list(problems) == names  # all others went on
    assert problems["absent"] == 'not installed: no_such_package; pip install "minidist[tools]"'
    assert problems["broken"] == "failed: rank 1 raised RuntimeError: a fault of rank 1"
    assert problems["killed"].startswith("failed: rank 1") and "SIGKILL" in problems["killed"]
    rows = {row.name: row for row in found if not row.problem}
    assert rows.keys() == {"DDP", "wrong"}
    assert rows["DDP"].difference < 1e-12 and 1e-3 < rows["wrong"].difference < 10
    assert "broken: failed: rank 1 raised" in table(found)


@soak
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


def with_a_wider_block(model):
    model.blocks[0].mlp = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 16))
    return model


OTHERS = {
    "tied": lambda: md.zoo.Transformer(256, 64, 16, 4, 4),
    "for longer rows": lambda: untied(128),
    "without blocks": lambda: untied(64, layers=0),
    "a wider block": lambda: with_a_wider_block(tiny()),
    "another class": lambda: md.zoo.mlp(64, 32, 10),
}


def test_the_planner_knows_one_model_only():
    assert shape_of(tiny()) == md.planner.Transformer(4, 16, 4, 64, 256, tied=False)
    for name, make in OTHERS.items():
        assert shape_of(make()) is None, name


@soak
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


# ---- what is written ---------------------------------------------------------------------------


def test_table_json_and_picture(rows, tmp_path):
    again = rows_of(json.loads(json.dumps(record(list(rows.values())))))
    assert again == list(rows.values())
    lines = table(again).splitlines()
    assert len(lines[0]) == len(lines[1]) and lines[1].startswith("one process")
    if "mixed" in rows:
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


def run_command(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["minidist", "compare", *words])
    __main__.main()
    matplotlib.pyplot.close("all")


def test_the_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    words = "--world-size 2 --steps 1 --only DDP tensor --data digits --model mine.py:build"
    run_command(monkeypatch, *words.split(), "--json", "found.json")
    said = capsys.readouterr()
    assert "2/2" in said.err and "tensor: cannot take the model: " in said.out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["world_size"] == 2 and found["machine"]["torch"] == torch.__version__
    assert [row.name for row in rows_of(found["rows"])] == ["DDP", "tensor"]
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


def test_options_that_make_no_sense(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "bad.py").write_text("nonsense")
    for options, words in REFUSED.items():
        only = [] if "--only" in options else ["--only", "one process", "DDP"]
        with pytest.raises(SystemExit) as ended:
            run_command(monkeypatch, *options.split(), *only)
        said = capsys.readouterr().err
        assert ended.value.code == 2 and words in said, (options, said)
        assert {path.name for path in tmp_path.iterdir()} == {"mine.py", "bad.py"}, options
