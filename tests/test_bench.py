"""The benchmarks measure what they say. How fast anything is, is no test's business."""

import functools
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minidist import bench
from minidist.bench import (
    NAMES,
    Row,
    collectives,
    ddp,
    fsdp,
    in_turns,
    mpich,
    pipeline,
    show,
    tensor,
    training,
    zero,
)


def test_subjects_are_timed_in_turns():
    calls = []
    subjects = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    assert in_turns(subjects, 3) == {"a": [1, 3, 5], "b": [2, 4, 6]}
    assert calls == list("ababab")


def test_a_ratio_is_that_of_each_pair(capsys):
    row = Row("ours", [1.0, 2.0], "theirs", (2.0, 1.0))
    assert row.ratios == [2.0, 0.5] and Row("alone", [1.0]).ratios == []
    show("a table", [row])
    assert "1.25× (0.5–2)" in capsys.readouterr().out


def test_a_step_lasts_as_long_as_its_slowest_rank():
    times = [{"plain": [1.0, 5.0]}, {"plain": [2.0, 4.0]}]
    taken = ddp.measure(lambda *_: times, {"plain": ddp.plain}, 2, 2)
    assert taken == {"plain": [2.0, 5.0]}


def test_every_kind_of_ddp_is_timed(pools):
    taken = ddp.measure(pools(2), ddp.WRAPPERS, batch=2, rounds=3, sizes=(4, 3, 2))
    assert list(taken) == list(ddp.WRAPPERS)
    assert {ours for pair in ddp.PAIRS for ours in pair} == set(ddp.WRAPPERS)
    for seconds in taken.values():
        assert len(seconds) == 3 and min(seconds) > 0


def text(rows):
    return functools.partial(training.text, rows, pipeline.LENGTH)


@pytest.mark.parametrize("schedule", pipeline.PAIRS)
def test_every_pipeline_is_timed_and_trains_the_same_model(pools, schedule):
    ways = pipeline.ways(schedule, layers=2, width=8)
    taken = training.measure(pools(2), ways, rounds=2, batch=text(8))
    assert list(taken) == ["minidist, gloo", "torch, gloo", "minidist, shm", "torch, shm"]
    for seconds in taken.values():
        assert len(seconds) == 2 and min(seconds) > 0


def test_every_tensor_parallel_step_is_timed_and_trains_the_same_model(pools):
    ways = tensor.ways(layers=1, width=8)
    taken = training.measure(pools(2), ways, rounds=2, batch=text(2))
    assert len(taken) == 8 and {len(seconds) for seconds in taken.values()} == {2}
    for kind in tensor.KINDS:
        assert {
            f"{who}, {there}{kind}" for who in ("minidist", "torch") for there in tensor.BACKENDS
        } < set(taken)


@pytest.mark.parametrize("module", [zero, fsdp])
def test_every_sharded_step_is_timed_and_trains_the_same_model(pools, module):
    sizes = (6, 8, 8, 4)
    ways, batch = module.ways(sizes), functools.partial(training.vectors, 3, 6, 4)
    taken = training.measure(pools(2), ways, rounds=2, batch=batch)
    assert list(taken) == [f"{s}, {b}" for s in module.STRATEGIES for b in module.BACKENDS]
    assert {len(seconds) for seconds in taken.values()} == {2}
    # parameters, gradients and two states of float32: all of them, or half
    whole = 16 * sum((n + 1) * m for n, m in zip(sizes, sizes[1:], strict=False))
    for name, peak in training.peaks(pools(2), ways, batch).items():
        assert peak > (whole if "DDP" in name else whole / 2), name


def test_a_step_that_trains_another_model_is_told(pools):
    def trainer(loss):
        return training.Trainer([], lambda inputs, targets: loss)

    def ways(**losses):
        return {name: functools.partial(trainer, loss) for name, loss in losses.items()}

    measure = functools.partial(training.measure, pools(2), rounds=1, batch=text(1))
    assert list(measure(ways(a=2.0, b=2.00001))) == ["a", "b"]
    with pytest.raises(RuntimeError, match=r"b comes to a loss of 2.001, and a to 2.0"):
        measure(ways(a=2.0, b=2.001))
    with pytest.raises(RuntimeError, match="b comes to a loss of nan, and a to 2.0"):
        measure(ways(a=2.0, b=float("nan")))
    with pytest.raises(RuntimeError, match="no rank knows the loss of b"):
        measure(ways(a=2.0, b=None))


@pytest.mark.parametrize("name", ["pipeline", "tensor"])
def test_a_table_and_a_picture_of_steps(monkeypatch, tmp_path, capsys, name):
    module = {"pipeline": pipeline, "tensor": tensor}[name]
    monkeypatch.setattr(module, "measure", lambda pool, ways, *_: dict.fromkeys(ways, [2.0]))
    monkeypatch.setattr(module, "WORLD_SIZES", [1])
    bench.run([name], 1, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    cases = len(pipeline.PAIRS) if name == "pipeline" else len(tensor.KINDS)
    for there, count in {"torch, gloo": 2, "torch, shm": 1}.items():
        assert sum(there in line for line in lines) == count * cases
    assert (tmp_path / f"bench_{name}.png").stat().st_size > 1000


@pytest.mark.parametrize("module", [zero, fsdp])
def test_a_table_and_a_picture_of_sharded_steps(monkeypatch, tmp_path, capsys, module):
    monkeypatch.setattr(module, "measure", lambda pool, ways, *_: dict.fromkeys(ways, [2.0]))
    monkeypatch.setattr(module, "peaks", lambda pool, ways, _: dict.fromkeys(ways, 12345))
    monkeypatch.setattr(module, "WORLD_SIZES", [1])
    name = module.__name__.rpartition(".")[2]
    bench.run([name], 1, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert sum("12,345" in line for line in lines) == len(module.STRATEGIES)
    rows = {zero: 2 * 2 * 2 * 2, fsdp: 2 * (2 + 4)}[module]
    assert sum("1× (1–1)" in line for line in lines) == rows
    assert (tmp_path / f"bench_{name}.png").stat().st_size > 1000


@pytest.mark.parametrize("world_size", [2, 3])
def test_shared_memory_is_timed_beside_gloo(monkeypatch, world_size):
    monkeypatch.setattr(collectives, "SHARED", {"all_reduce": [12000], "all_gather": [12000]})
    rows = collectives.by_shared_memory(world_size, rounds=1)
    assert [row.what.partition(": ")[2] for row in rows] == ["shm", "shm, in its arena", "shm"]
    for row in rows:
        assert f"{world_size} ranks, 12 kB" in row.what and row.against == "gloo"
        assert len(row.seconds) == len(row.theirs) == 2 and min(row.seconds) > 0


def test_a_check_is_a_part_of_its_call():
    row = collectives.by_checking(2, rounds=2)
    assert len(row.seconds) == len(row.theirs) == 4
    assert 0 < min(row.seconds) < max(row.theirs)


# ---- MPICH, where it is installed ---------------------------------------------------------


def test_without_mpi4py_the_bench_says_so_and_goes_on(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setattr(collectives, "SIZES", [64, 128])
    monkeypatch.setattr(collectives, "SHARED", {"all_reduce": [16000]})
    collectives.run(1, tmp_path / "picture.png")
    said = [line for line in capsys.readouterr().out.splitlines() if "MPICH" in line]
    (line,) = said
    assert line.startswith("MPICH is left out: mpi4py is not installed") and ".[mpi]" in line


@pytest.mark.parametrize("name", collectives.SHARED)
@pytest.mark.parametrize("world_size", [2, 4])
def test_mpich_is_timed(name, world_size):
    if lacking := mpich.missing():
        pytest.skip(lacking)
    taken = mpich.seconds(name, world_size, 16000, rounds=3)
    assert len(taken) == 3 and min(taken) > 0


def test_a_rank_of_mpich_that_raises_is_quoted(monkeypatch):
    if lacking := mpich.missing():
        pytest.skip(lacking)
    with pytest.raises(RuntimeError, match="mpiexec ended with 1: KeyError: 'no_such'"):
        mpich.seconds("no_such", 2, 16000, rounds=1)


def test_mpich_ends_at_the_limit_and_leaves_nothing(monkeypatch):
    if lacking := mpich.missing():
        pytest.skip(lacking)
    before = set(Path("/dev/shm").glob("mpich_shm_*"))
    monkeypatch.setattr(mpich, "LIMIT", 2)
    with pytest.raises(RuntimeError, match="mpiexec took longer than 2 s"):
        mpich.seconds("all_reduce", 2, 10**6, rounds=987654321)  # a number to know it by
    deadline = time.monotonic() + 4  # before mpiexec's own limit
    while "987654321" in (there := subprocess.check_output(["ps", "-A", "-o", "args"], text=True)):
        assert time.monotonic() < deadline, there
        time.sleep(0.1)
    assert set(Path("/dev/shm").glob("mpich_shm_*")) <= before


def times(**changed):
    return json.dumps({"library": "MPICH", "ranks": 2, "seconds": [0.5, 2]} | changed)


def test_times_of_mpich_are_read_from_among_other_lines():
    assert mpich.parse(f"a warning\n{times()}\n", 2, 2) == [0.5, 2.0]


@pytest.mark.parametrize(
    ("printed", "complaint"),
    [
        ("a warning", "no times came back"),
        (times(library="Open MPI"), "mpi4py runs on Open MPI here, not on MPICH"),
        (f"{times(ranks=1)}\n{times(ranks=1)}", "2 ranks were started, and 1 met"),
    ],
)
def test_what_is_not_a_time_of_mpich_is_refused(printed, complaint):
    with pytest.raises(RuntimeError, match=complaint):
        mpich.parse(printed, 2, 2)


def test_a_failure_of_mpich_leaves_the_rest_of_the_table(monkeypatch, tmp_path, capsys):
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text("#!/bin/sh\necho 'no such host' >&2\nexit 3\n")
    mpiexec.chmod(0o755)
    monkeypatch.setattr(mpich, "_mpiexec", lambda: str(mpiexec))
    monkeypatch.setattr(collectives, "SHARED", {"all_gather": [12000, 24000]})
    rows = collectives.by_shared_memory(2, rounds=1, with_mpich=True)
    assert [row.against for row in rows] == ["gloo", "gloo"]
    said = (
        "MPICH is left out from all_gather, 2 ranks, 12 kB on: mpiexec ended with 3: no such host\n"
    )
    assert capsys.readouterr().out == said


def test_mpich_stands_beside_gloo(monkeypatch):
    monkeypatch.setattr(mpich, "seconds", lambda name, world_size, size, rounds: [1.0] * rounds)
    monkeypatch.setattr(collectives, "SHARED", {"all_gather": [12000]})
    rows = collectives.by_shared_memory(2, rounds=1, with_mpich=True)
    assert [(row.against, row.what) for row in rows] == [
        ("gloo", "all_gather, 2 ranks, 12 kB: shm"),
        ("MPICH", "all_gather, 2 ranks, 12 kB: shm"),
    ]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["speed"], f"there is no benchmark speed; there are {', '.join(NAMES)}"),
        (["ddp", "--rounds", "0"], "--rounds must be 1 or more"),
        (["ddp", "--out", "no/such/folder"], "no such folder"),
    ],
)
def test_the_command_says_what_it_cannot_do(arguments, complaint):
    command = [sys.executable, "-m", "minidist", "bench", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2 and complaint in ran.stderr


def test_algorithms_are_timed_by_size(pools):
    samples = collectives.measure(pools(2), [16, 64], ["shm", "ring"], 3)
    for name in "shm", "ring":
        assert [size for size, _ in samples[name]] == [16] * 3 + [64] * 3
        assert all(seconds > 0 for _, seconds in samples[name])
