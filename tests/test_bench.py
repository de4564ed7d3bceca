"""The benchmarks measure what they say. How fast anything is, is no test's business."""

import functools
import json
import os
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

import minidist as md
from minidist import __main__
from minidist.instruments import bench
from minidist.instruments.bench import (
    Noise,
    Row,
    Target,
    Times,
    ddp,
    quiet,
    shared,
    training,
    turns,
)

# ---- moments in which others take the machine ---------------------------------------------


def subjects(calls):
    """Two that write down their calls and return how many there were."""

    def call(name):
        calls.append(name)
        return float(len(calls))

    return {name: functools.partial(call, name) for name in "ab"}


@pytest.fixture
def shares(monkeypatch):
    """What others take in each moment, one after the other; then nothing."""
    left = []

    class Moment:
        def __init__(self, root):
            pass

        def share(self):
            return left.pop(0) if left else 0.0

    monkeypatch.setattr(turns, "Moment", Moment)
    return left


def test_subjects_are_timed_in_turns_and_the_first_rounds_do_not_count(shares):
    calls = []
    assert turns.in_turns(subjects(calls), 3) == {"a": [1, 3, 5], "b": [2, 4, 6]}
    assert calls == list("ababab")
    assert turns.in_turns(subjects([]), 2, warm=2) == {"a": [5, 7], "b": [6, 8]}


def test_rounds_in_which_others_compute_are_thrown_away_and_taken_again(shares):
    shares += [0.0, 0.2, turns.LIMIT]  # one round, then the two others together
    times, calls = turns.in_turns(subjects([]), 3), []
    assert times == {"a": [1, 7, 9], "b": [2, 8, 10]}
    assert (times.noise.thrown, times.noise.kept) == (2, 0)
    shares += [0.2] * 99
    times = turns.in_turns(subjects(calls), 1)
    assert times.noise.thrown == turns.PATIENCE // quiet.MOMENT
    assert times == {"a": [2 * times.noise.thrown + 1], "b": [len(calls)]}
    assert times.noise.kept == 1 and len(calls) == 2 * times.noise.thrown + 2


def test_a_machine_that_does_not_say_throws_nothing_away(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(quiet, "PROC", tmp_path / "no such folder")  # as on macOS
    times = turns.in_turns(subjects([]), 3)
    assert len(times["a"]) == 3 and not times.noise.watched and not times.noise.thrown
    bench.show("a table", [times.row("a", "a", "b")])
    assert "nothing was thrown away: this machine does not say" in capsys.readouterr().out


# ---- rows, targets, and the file -----------------------------------------------------------


def test_how_a_target_stands():
    rows = [Row("a", [1.0, 1.0, 1.0], "gloo", (2.0, 3.0, 9.0)), Row("b", [1.0], "gloo", (1.0,))]
    reach = {("a", "gloo"): 3.0}
    assert Target("t", reach).line(rows) == "met          t: 3 × (reach 3 ×)"
    assert Target("t", reach | {("b", "gloo"): 1.5}).stands(rows) == "missed"
    assert Target("t", reach | {("a", "torch"): 1}).stands(rows) == "not measured"
    some = Target("t", {("a", "torch"): 1, ("b", "gloo"): 1.5})
    assert some.line(rows) == "missed       t: – / 1 × (reach 1 / 1.5 ×)"


def test_every_target_is_of_a_row_that_is_measured(monkeypatch, tmp_path):
    def times(*names):
        return Times({name: [2.0] for name in names})

    monkeypatch.setattr(md, "ranks", lambda *_, **__: nullcontext(mock.Mock()))
    monkeypatch.setattr(shared, "on", lambda pool, name, size, hows, rounds: times(*hows))
    monkeypatch.setattr(training, "peaks", lambda *_: {})
    monkeypatch.setattr(ddp, "measure", lambda *_: times(*ddp.WRAPPERS))
    rows, targets = shared.rows(2, 1) + ddp.run(1, tmp_path / "a.png"), shared.TARGETS + ddp.TARGETS
    for name in "pipeline", "tensor", "fsdp":
        module = import_module(f"minidist.instruments.bench.{name}")
        monkeypatch.setattr(module, "measure", lambda pool, ways, *_: times(*ways))
        rows, targets = rows + module.run(1, tmp_path / "a.png"), targets + module.TARGETS
    assert len(targets) == 10
    for target in targets:
        assert None not in target.measured(rows), target.name


def test_all_figures_go_into_a_file(monkeypatch, tmp_path, capsys):
    times = Times({"ours": [1.0, 3.0, 2.0], "theirs": [2.0, 3.0, 8.0]}, Noise(thrown=5))
    monkeypatch.setattr(ddp, "run", lambda rounds, picture: [times.row("x", "ours", "theirs")])
    monkeypatch.setattr(ddp, "TARGETS", [Target("fast", {("x", "theirs"): 2.5})])
    bench.run(["ddp"], 3, tmp_path, tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    (row,) = found["benchmarks"]["ddp"]
    assert row["seconds"] == {"median": 2.0, "min": 1.0, "max": 3.0, "all": [1.0, 3.0, 2.0]}
    assert row["against"]["what"] == "theirs" and row["against"]["seconds"]["median"] == 3.0
    assert row["times faster"] == {"median": 2.0, "min": 1.0, "max": 4.0, "all": [2.0, 1.0, 4.0]}
    assert row["rounds thrown away"] == 5 and row["noisy rounds kept"] == 0
    (target,) = found["targets"]
    case = {"what": "x", "against": "theirs", "reach": 2.5, "measured": 2.0}
    assert target["stands"] == "missed" and target["cases"] == [case]
    assert "missed       fast: 2 × (reach 2.5 ×)" in capsys.readouterr().out


def test_the_command_says_what_there_is_and_what_it_cannot_do(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["minidist", "bench", *arguments])
        with pytest.raises(SystemExit) as ended:
            __main__.main()
        return ended.value.code, capsys.readouterr()

    for arguments, complaint in [
        (["speed"], f"there is no benchmark speed; there are {', '.join(bench.NAMES)}"),
        (["ddp", "--rounds", "0"], "--rounds must be 1 or more"),
        (["ddp", "--out", "no/such/folder"], "no such folder"),
        (["ddp", "--json", "no/such/file"], "--json no/such/file: no file can be written there"),
        (["ddp", "--json", "."], "--json .: no file can be written there"),
    ]:
        code, said = run(*arguments)
        assert code == 2 and complaint in said.err, arguments
    lines = run("--help")[1].out.splitlines()
    for name in bench.NAMES:
        (line,) = [line for line in lines if line.startswith(f"  {name} ")]
        assert len(line.split()) > 5


# ---- on ranks --------------------------------------------------------------------------------


def test_ranks_agree_on_times_and_must_train_the_same_model(pools):
    def slow(root):
        quiet.PROC = Path("no such folder")  # to wait until others compute less takes longest
        return turns.in_turns({"a": lambda: float(dist.get_rank())}, 3, root=root)

    found = pools(2)(slow, os.getpid())
    assert [dict(times) for times in found] == [{"a": [1.0] * 3}] * 2  # the slowest rank's

    def trainer(loss):
        return training.Trainer([], lambda inputs, targets: loss)

    def measure(**losses):
        ways = {name: functools.partial(trainer, loss) for name, loss in losses.items()}
        return training.measure(pools(2), ways, 1, functools.partial(training.vectors, 1, 1, 1))

    assert list(measure(a=2.0, b=2.00001)) == ["a", "b"]
    for b, complaint in [
        (2.001, "b comes to a loss of 2.001, and a to 2.0"),
        (None, "no rank knows the loss of b"),
    ]:
        with pytest.raises(RuntimeError, match=complaint):
            measure(a=2.0, b=b)


CASES = {name: [size and 12000 for size in sizes[:1]] for name, sizes in shared.CASES.items()}
SMALL = {
    "collectives.SIZES": [64, 128],
    "shared.CASES": CASES,
    "averaging.RANKS": 2,
    "averaging.STEPS": 48,
    "averaging.LINKS": {"fast": md.Link(gbps=100)},
    "saving.BYTES": 4 * 10**6,
    "experts.ROW": 1e-5,
}
for each in "ddp", "zero", "fsdp", "pipeline", "tensor", "saving":
    SMALL[f"{each}.WORLD_SIZES"] = [2]
for each in "ddp", "zero", "fsdp":
    SMALL |= {f"{each}.SIZES": (6, 8, 8, 4), f"{each}.BATCHES": [3]}


@pytest.mark.soak
@pytest.mark.parametrize("name", bench.NAMES)
def test_a_benchmark_runs(monkeypatch, tmp_path, name):
    for constant, value in SMALL.items():
        monkeypatch.setattr(f"minidist.instruments.bench.{constant}", value)
    bench.run([name], 1, tmp_path, tmp_path / "found.json")
    assert (tmp_path / f"bench_{name}.png").stat().st_size > 1000
    rows = json.loads((tmp_path / "found.json").read_text())["benchmarks"][name]
    assert rows and all(row["seconds"]["min"] > 0 for row in rows)
