"""The benchmarks measure what they say. How fast anything is, is no test's business."""

import functools
import json
import os
import sys
from contextlib import nullcontext
from importlib import import_module
from unittest import mock

import psutil
import pytest
import torch.distributed as dist

import minidist as md
from minidist import __main__
from minidist.instruments import bench
from minidist.instruments.bench import Row, Target, Times, collectives, training, turns

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
    monkeypatch.setattr(turns._Others, "share", lambda self: left.pop(0) if left else 0.0)
    return left


def test_subjects_are_timed_in_turns_and_the_first_rounds_do_not_count(shares):
    calls = []
    assert turns.in_turns(subjects(calls), 3) == {"a": [1, 3, 5], "b": [2, 4, 6]}
    assert calls == list("ababab")
    assert turns.in_turns(subjects([]), 2, warm=2) == {"a": [5, 7], "b": [6, 8]}


def test_rounds_in_which_others_compute_are_taken_again(shares):
    shares += [0.0, 0.2, turns.LIMIT]  # one round, then the two others together
    times, calls = turns.in_turns(subjects([]), 3), []
    assert times == {"a": [1, 7, 9], "b": [2, 8, 10]} and times.disturbed == 0
    shares += [0.2] * 99
    times = turns.in_turns(subjects(calls), 1)
    again = turns.PATIENCE // turns.MOMENT
    assert times == {"a": [2 * again + 1], "b": [2 * again + 2]} and times.disturbed == 1


def test_what_is_idle_or_ours_is_not_taken_by_others(monkeypatch):
    monkeypatch.setattr(turns, "MOMENT", 0.01)
    others, cores = turns._Others(os.getpid()), os.cpu_count()
    kept = psutil.cpu_times()
    monkeypatch.setattr(psutil, "cpu_times", lambda: kept)  # as if no core was idle since
    assert 1 - 1 / cores < others.share() <= 1  # but for ours, one core at most
    monkeypatch.setattr(psutil, "cpu_times", lambda: kept._replace(idle=kept.idle + 1000 * cores))
    assert others.share() < 0


# ---- rows, targets, and the file -----------------------------------------------------------


def test_how_a_target_stands():
    rows = [Row("a", [1.0, 1.0, 1.0], "gloo", (2.0, 3.0, 9.0)), Row("b", [1.0], "gloo", (1.0,))]
    reach = {("a", "gloo"): 3.0}
    assert Target("t", reach).line(rows) == "met          t: 3 × (reach 3 ×)"
    assert Target("t", reach | {("b", "gloo"): 1.5}).stands(rows) == "missed"
    assert Target("t", reach | {("a", "torch"): 1}).stands(rows) == "not measured"
    some = Target("t", {("a", "torch"): 1, ("b", "gloo"): 1.5})
    assert some.line(rows) == "missed       t: – / 1 × (reach 1 / 1.5 ×)"


def test_every_target_is_of_a_row_that_is_measured(monkeypatch):
    """Of those benchmarks that take their times by `measure` or `on`."""

    def times(*names):
        return Times({name: [2.0] for name in names})

    monkeypatch.setattr(md, "ranks", lambda *_, **__: nullcontext(mock.Mock()))
    monkeypatch.setattr(collectives, "on", lambda pool, name, size, how, rounds: times(how))
    rows, targets = collectives.run(1), collectives.TARGETS
    for name in "ddp", "pipeline", "tensor", "fsdp":
        module = import_module(f"minidist.instruments.bench.{name}")
        monkeypatch.setattr(module, "measure", lambda pool, ways, *_: times(*ways))
        rows, targets = rows + module.run(1), targets + module.TARGETS
    assert len(targets) == 10
    for target in targets:
        assert None not in target.measured(rows), target.name


def test_a_table_the_targets_and_a_file(monkeypatch, tmp_path, capsys):
    times = Times({"ours": [1.0, 3.0, 2.0], "theirs": [2.0, 3.0, 8.0]})
    times.disturbed = 2
    made = mock.Mock(TARGETS=[Target("fast", {("x", "theirs"): 2.5})])
    made.run = lambda rounds: [times.row("x", "ours", "theirs")]
    monkeypatch.setattr(bench.importlib, "import_module", lambda name: made)
    bench.run(["ddp"], 3, tmp_path / "found.json")
    out = capsys.readouterr().out
    for line in [
        "x   2,000 (1,000–3,000)   theirs  3,000 (2,000–8,000)    2× (1–4)",
        "other processes took part of the machine, in up to 2 rounds of a row",
        "missed       fast: 2 × (reach 2.5 ×)",
    ]:
        assert " ".join(line.split()) in " ".join(out.split())
    found = json.loads((tmp_path / "found.json").read_text())
    (row,) = found["benchmarks"]["ddp"]
    assert (row["what"], row["seconds"], row["theirs"]) == ("x", times["ours"], times["theirs"])
    assert found["targets"] == {"fast": ["missed", 2.0]}


def test_the_command_says_what_there_is_and_what_it_cannot_do(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["minidist", "bench", *arguments])
        with pytest.raises(SystemExit) as ended:
            __main__.main()
        return ended.value.code, capsys.readouterr()

    for arguments, complaint in [
        (["speed"], f"there is no benchmark speed; there are {', '.join(bench.NAMES)}"),
        (["ddp", "--rounds", "0"], "--rounds must be 1 or more"),
        (["ddp", "--json", "no/such/file"], "--json no/such/file: no file can be written there"),
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
        turns.LIMIT = 2.0
        return turns.in_turns({"a": lambda: float(dist.get_rank())}, 3, root=root)

    found = pools(2)(slow, os.getpid())
    assert [dict(times) for times in found] == [{"a": [1.0] * 3}] * 2  # the slowest rank's

    def trainer(loss):
        return training.Trainer(lambda inputs, targets: loss)

    def measure(**losses):
        ways = {name: functools.partial(trainer, loss) for name, loss in losses.items()}
        return training.measure(pools(2), ways, 1, functools.partial(training.vectors, 1, 1))

    assert list(measure(a=2.0, b=2.00001)) == ["a", "b"]
    for b in 2.001, None:
        with pytest.raises(RuntimeError, match=r"b comes to the losses .*, a to \[2.0, 2.0\]"):
            measure(a=2.0, b=b)


def test_algorithms_are_timed_by_size(pools):
    found = collectives.measure(pools(2), [64, 128], ["ring", "tree"], 2)
    assert {name: [size for size, _ in taken] for name, taken in found.items()} == {
        "ring": [64, 64, 128, 128],
        "tree": [64, 64, 128, 128],
    }
    assert min(seconds for taken in found.values() for _, seconds in taken) > 0


CASES = {name: [size and 12000 for size in sizes[:1]] for name, sizes in collectives.CASES.items()}
SMALL = {
    "collectives.CASES": CASES,
    "ddp.BATCHES": [3],
    "fsdp.BATCHES": [3],
    "saving.BYTES": 4 * 10**6,
}
for each in "collectives", "ddp", "fsdp", "pipeline", "tensor", "saving", "watching":
    SMALL[f"{each}.WORLD_SIZES"] = [2]


@pytest.mark.soak
@pytest.mark.parametrize("name", bench.NAMES)
def test_a_benchmark_runs(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    for constant, value in SMALL.items():
        monkeypatch.setattr(f"minidist.instruments.bench.{constant}", value)
    bench.run([name], 1, tmp_path / "found.json")
    rows = json.loads((tmp_path / "found.json").read_text())["benchmarks"][name]
    assert rows and all(min(row["seconds"]) > 0 for row in rows)
