"""The benchmarks measure what they say. How fast anything is, is no test's business."""

import subprocess
import sys

import pytest

from minidist.bench import NAMES, Row, collectives, ddp, in_turns, show


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


@pytest.mark.parametrize("world_size", [2, 3])
def test_shared_memory_is_timed_beside_gloo(monkeypatch, world_size):
    monkeypatch.setattr(collectives, "SHARED", {"all_reduce": [12000], "all_gather": [12000]})
    rows = collectives.by_shared_memory(world_size, rounds=1)
    assert [row.what.partition(": ")[2] for row in rows] == ["shm", "shm, in its arena", "shm"]
    for row in rows:
        assert f"{world_size} ranks, 12 kB" in row.what and row.against == "gloo"
        assert len(row.seconds) == len(row.theirs) == 2 and min(row.seconds) > 0


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
    samples = collectives.measure(pools(2), [16, 64], ["gloo", "ring"], 3)
    for name in "gloo", "ring":
        assert [size for size, _ in samples[name]] == [16] * 3 + [64] * 3
        assert all(seconds > 0 for _, seconds in samples[name])
