"""`python -m minidist compare`: every way to train is held against one process, and no fault of one
keeps the others from their rows."""

import json
import math
import os
import signal
import sys

import matplotlib
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import minidist as md
from minidist import __main__
from minidist.context_parallel import cost, ring_attention
from minidist.instruments import compare
from minidist.instruments.compare import SYSTEMS, Row, System, Task, replicas, table
from minidist.instruments.compare.watched_steps import HOST, sent

matplotlib.use("Agg")

ALL = [system.name for system in SYSTEMS]
FEW = ["one process", "DDP", "ZeRO-2", "FSDP", "tensor"]  # by day
soak = pytest.mark.soak


def tiny():
    """Of the text: bytes (B, 64) to logits (B, 64, 256)."""
    model = md.zoo.Transformer(256, 64, 16, 4, 4)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


@pytest.fixture(scope="module", params=[pytest.param(FEW, id="few"), pytest.param(ALL, marks=soak)])
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
        assert row.problem == "" and row.difference < 1e-12, row
        assert math.isclose(row.loss, rows["one process"].loss, rel_tol=1e-5), name
        assert row.seconds > 0, name


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
    """Exactly, but that of FSDP a flag for each tensor says who has a gradient, and that torch's
    keeps the last unit from forward to backward."""
    N, size = ranks_of(rows), sum(p.numel() for p in tiny().parameters())
    stages = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "FSDP": 3, "torch DDP": 0, "torch FSDP": 3}
    stages |= {"FSDP + checkpointing": 3, "FSDP + offload": 3}
    for name, row in rows.items():
        if name not in stages:
            assert row.planned is None, name
            continue
        assert row.planned == md.planner.traffic(size, N, stages[name], precision="float32") > 0
        flags = 2 * (N - 1) / N * len(list(tiny().parameters())) if "FSDP" in name else 0
        if name == "torch FSDP":
            assert 0.7 * row.planned < row.sent < row.planned
        else:
            assert row.sent == pytest.approx(row.planned + flags, rel=1e-12), name
    assert all(rows[name].sent == 0 for name in {"one process", "DP"} & rows.keys())


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


def partly(task, watch):
    state = wrong(task, watch)
    del state["a.bias"]
    return state


def test_a_system_that_fails_is_a_row():
    own = [System(train.__name__, train) for train in (wrong, broken, killed, partly)]
    ddp, *_ = (system for system in SYSTEMS if system.name == "DDP")
    found = compare.run(2, systems=[*own, ddp], model=Bare, data="digits", steps=1)
    problems = {row.name: row.problem for row in found}
    assert list(problems) == ["wrong", "broken", "killed", "partly", "DDP"]  # all others went on
    assert problems["broken"] == "rank 1 raised RuntimeError: a fault of rank 1"
    assert problems["killed"].startswith("rank 1") and "SIGKILL" in problems["killed"]
    assert problems["partly"] == "no rank returns a.bias"
    rows = {row.name: row for row in found if not row.problem}
    assert rows.keys() == {"DDP", "wrong"}
    assert rows["DDP"].difference < 1e-12 and 1e-3 < rows["wrong"].difference < 10
    assert "broken: rank 1 raised" in table(found)


def test_a_name_that_is_unknown():
    with pytest.raises(ValueError, match="there is no system FDSP; there are one process, DP, DDP"):
        compare.run(2, only=["DDP", "FDSP"])


# ---- what is written ---------------------------------------------------------------------------


def test_table_json_and_picture(rows):
    again = [Row(**found) for found in json.loads(json.dumps([*map(vars, rows.values())]))]
    assert again == list(rows.values())
    lines = table(again).splitlines()
    assert len(lines[0]) == len(lines[1]) and lines[1].startswith("one process")
    if "mixed" in rows:
        assert "mixed: data 2 × pipeline 1 × tensor 2" in lines
        assert any("more on the host" in line for line in lines)
    figure = compare.draw(again + [Row("absent", problem="x")])
    left, middle, right = figure.axes
    assert [label.get_text() for label in left.get_yticklabels()] == list(rows)
    assert [bar.get_width() for bar in middle.patches] == [row.seconds for row in again]
    drawn = sum(bar.get_width() for bar in right.patches)
    assert drawn == sum(sum(row.memory.values()) for row in again)
    assert "in float64" in figure.get_suptitle()
    matplotlib.pyplot.close(figure)


MODEL = """
from torch import nn
from torch.nn import functional as F
def build():
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
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
    said = capsys.readouterr().out
    assert "DDP …" in said and "tensor: every rank raised" in said
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["world_size"] == 2 and found["machine"]["torch"] == torch.__version__
    ddp, tensor = (Row(**row) for row in found["rows"])
    assert ddp.difference < 1e-12 and tensor.problem
    assert {path.name for path in tmp_path.iterdir()} == {"mine.py", "found.json", "compare.png"}


def test_options_that_make_no_sense(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for options, words in {
        "--only FDSP": "there is no system FDSP; there are one process, DP, DDP,",
        "--data cats": "invalid choice: 'cats'",
        "--json nowhere/c.json": "there is no such folder",
    }.items():
        with pytest.raises(SystemExit) as ended:
            run_command(monkeypatch, *options.split())
        assert ended.value.code == 2 and words in capsys.readouterr().err, options


def test_the_task_is_the_same_at_every_call():
    task = Task(tiny, rows=8, steps=2)
    one, other = task.make().state_dict(), task.make().state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    (inputs, targets), second = task.batches()
    assert inputs.shape == targets.shape == (8, 64) and not torch.equal(inputs, second[0])


# ---- the judge of the lesson real_tools --------------------------------------------------------


def no_sharding(model, make):
    """Asked for ZeRO-1: it is DDP, so the weights are right."""
    return md.DistributedDataParallel(model), make(model.parameters())


def half_a_sharding(model, make):
    """The right types, but each rank keeps four bytes a parameter more."""
    model = md.DistributedDataParallel(model)
    optimizer = md.ZeroRedundancyOptimizer(model.parameters(), make.func, **make.keywords)
    optimizer.kept = [torch.zeros_like(p) for p in model.parameters()]
    return model, optimizer


def unwrapped(model, make):
    return model, make(model.parameters())


@pytest.mark.parametrize(
    "strategy, trains, held, said",
    [
        (unwrapped, "Sequential", 16, "step 1, rank 0: 0.weight differs"),
        (no_sharding, "ZeroRedundancyOptimizer", 16, "DistributedDataParallel, Adam trains and"),
        (half_a_sharding, "ZeroRedundancyOptimizer", 12, "holds 16.0 bytes a parameter, not Zero"),
    ],
)
def test_the_judge_refuses_what_trains_otherwise(pools, strategy, trains, held, said):
    judge = compare.Judge(lambda: md.zoo.mlp(64, 64, 64), pools(2))
    with pytest.raises(AssertionError, match=said):
        judge("it", strategy, trains, held)
    assert not judge.rows


def test_the_judge_passes_what_is_right(pools, capsys):
    judge = compare.Judge(lambda: md.zoo.mlp(64, 64, 64), pools(2))
    judge("DDP", no_sharding, "DistributedDataParallel", 16)
    assert capsys.readouterr().out.endswith("16.0 bytes; DistributedDataParallel, Adam\n")
    parts = {"parameters": 4, "gradients": 4, "optimizer states": 8}
    assert {k: round(v, 2) for k, v in judge.rows["DDP"].parts.items() if v > 0.01} == parts


# ---- attention, for the lesson long_sequences --------------------------------------------------


def alone(q, k, v, cut):
    """Each rank looks at its own tokens only."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def test_an_attention_is_held_against_one_process(pools):
    numbers = cost.sent("ring", 2, 48 * 3 * 8, 12, 3)
    for difference, *nbytes in pools(2)(compare.attention, ring_attention, kv_heads=3):
        assert difference < 1e-12 and nbytes == [8 * n for n in numbers]
    assert min(found[0] for found in pools(2)(compare.attention, alone)) > 0.1
