"""The systems of others in `compare`: each trains as one process does and sends what it should. A
fault of one is its own row. Nothing is left behind."""

import math
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

import minidist as md
from minidist import compare
from minidist.compare import System, tool_systems
from minidist.compare.build_locks import remove_stale, stale

NAMES = [system.name for system in tool_systems.SYSTEMS]
# What a rank sends in a step, in sizes of the model, times (N - 1)/N.
SENT = dict.fromkeys(NAMES, 2) | {
    "FairScale ZeRO-1": 3,  # all_reduce, and a broadcast of each parameter
    "DeepSpeed ZeRO-1": 3,
    "DeepSpeed ZeRO-2": 3,  # not 2: all_reduce and all_gather
    "DeepSpeed ZeRO-3": 3,
}
BESIDES = 200  # bytes: flags, the sums of losses, tensors made divisible by 3


def mlp():
    """Digits (B, 64) to logits (B, 10): 12,000 parameters, in tensors that three ranks can share
    more or less evenly."""
    return md.zoo.mlp(64, 64, 64, 48, 10)


def left_behind(*folders):
    """Processes, ports, shared memory, locks, and files in these folders."""
    children = psutil.Process().children(recursive=True)
    ports = [c.laddr.port for c in psutil.Process().net_connections() if c.status == "LISTEN"]
    for child in children:
        ports += [c.laddr.port for c in child.net_connections() if c.status == "LISTEN"]
    locks = stale(Path(sys.prefix, "torch_extensions"))  # others may build
    files = [path for folder in folders for path in Path(folder).rglob("*") if path.is_file()]
    files = [path for path in files if path.suffix != ".pyc"]  # which Python keeps of an import
    return {*(child.pid for child in children), *ports, *Path("/dev/shm").glob("*deepspeed*")} | {
        *locks,
        *files,
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """{name: row}, on three ranks; and what is there afterwards that was not before."""
    home, scratch = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("scratch")
    with md.ranks(1):  # the forkserver stays
        pass
    before = left_behind(home, scratch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("TMPDIR", str(scratch))
        patch.setenv("MPLCONFIGDIR", os.environ.get("MPLCONFIGDIR", str(home.parent)))
        patch.setattr(tempfile, "tempdir", None)
        patch.chdir(scratch)
        rows = compare.run(3, only=["one process", *NAMES], model=mlp, data="digits", steps=1)
        after = left_behind(home, scratch)
    return {row.name: row for row in rows}, after - before


@pytest.mark.tools
@pytest.mark.parametrize("name", NAMES)
def test_a_system_trains_as_one_process_does(found, name):
    """Weights and losses of three steps with SGD, in float64; DeepSpeed computes in float32. The
    loss after five steps with Adam, in float32, too."""
    row, alone = found[0][name], found[0]["one process"]
    assert row.problem == ""
    allowed = {"float64": 1e-12, "float32": 1e-6}[row.exact]
    assert row.difference < allowed and (row.exact == "float32") == name.startswith("DeepSpeed")
    assert math.isclose(row.loss, alone.loss, rel_tol=1e-5)
    assert row.peer and 0 < row.seconds < 60


@pytest.mark.tools
@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_counted(found, name):
    row, parameters = found[0][name], sum(p.numel() for p in mlp().parameters())
    assert 0 <= row.sent - SENT[name] * 2 / 3 * 4 * parameters < BESIDES
    stage = 0 if name.endswith("DDP") else int(name[-1])
    assert row.planned == md.planner.traffic(parameters, 3, stage, precision="float32")


@pytest.mark.tools
@pytest.mark.parametrize("name", NAMES)
def test_states_are_shared_out(found, name):
    """Adam's two states on the fullest rank: from stage 1 on a third of them, as near as whole
    tensors allow. DeepSpeed has a copy of its parameters among them."""
    kinds = 3 if name.startswith("DeepSpeed") and not name.endswith("0") else 2
    shares = 1 if name.endswith(("DDP", "0")) else 3
    whole = kinds * 4 * sum(p.numel() for p in mlp().parameters())
    held = found[0][name].memory["optimizer states"]
    assert held == pytest.approx(whole / shares, rel=0.1)


@pytest.mark.tools
def test_nothing_is_left_behind(found):
    assert found[1] == set()


# ---- faults ------------------------------------------------------------------------------------


def killed(task, watch):
    """A rank is killed, with DeepSpeed loaded."""
    tool_systems.deepspeed_zero(task, watch, 1)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def refused(task, watch):
    """FairScale's own error: its optimizer gets no class."""
    return tool_systems.oss(replace(task, optimizer_class=None), watch)


@pytest.mark.tools
def test_a_fault_of_one_is_its_own_row(tmp_path, monkeypatch):
    """Lightning is half installed here; the others are well."""
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning/__init__.py").write_text("from lightning.nowhere import nothing")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    faults = [
        System("killed", killed, peer=True, needs=("deepspeed",), float64=False),
        System("refused", refused, peer=True, needs=("fairscale",)),
    ]
    by_name = {system.name: system for system in tool_systems.SYSTEMS}
    well = [by_name["FairScale ZeRO-2"], by_name["Accelerate DDP"]]
    systems = [faults[0], well[0], by_name["Lightning DDP"], faults[1], well[1]]
    monkeypatch.setattr(tool_systems, "SYSTEMS", systems)
    names = [system.name for system in systems]
    before = left_behind(tmp_path)
    rows = compare.run(2, only=names, model=mlp, data="digits", steps=1)
    problems = {row.name: row.problem for row in rows}
    assert list(problems) == names
    assert problems["killed"].startswith("failed: rank 1") and "SIGKILL" in problems["killed"]
    assert "No module named 'lightning.nowhere'" in problems["Lightning DDP"]
    assert problems["refused"].startswith("failed: every rank raised TypeError")
    assert [problems[system.name] for system in well] == ["", ""]
    assert all(row.difference < 1e-12 for row in rows if not row.problem)
    assert left_behind(tmp_path) <= before


def test_a_lock_that_nobody_holds_is_removed(tmp_path):
    """And no other: who builds has it open."""
    left, held = tmp_path / "one/lock", tmp_path / "other/lock"
    for lock in left, held:
        lock.parent.mkdir()
    left.touch()
    with held.open("x"):
        remove_stale(tmp_path)
        assert not left.exists() and held.exists()
    remove_stale(tmp_path)
    assert not held.exists()


@pytest.mark.tools
def test_a_lock_of_a_killed_build_stops_nobody(tmp_path, monkeypatch):
    """torch would wait for it for ever."""
    built = Path(sys.prefix, "torch_extensions")
    shutil.copytree(built, tmp_path / "built", ignore=shutil.ignore_patterns("lock"))
    for folder in (tmp_path / "built").iterdir():
        if folder.is_dir():
            (folder / "lock").touch()
    assert list((tmp_path / "built").glob("*/lock"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    (row,) = compare.run(2, only=["DeepSpeed ZeRO-1"], model=mlp, data="digits", steps=1)
    assert row.problem == "" and row.difference < 1e-6
    assert not list((tmp_path / "built").glob("*/lock"))
