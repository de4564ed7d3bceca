"""The systems of others in `compare`: each trains as one process does and sends what it should.
Nothing is left behind."""

import math
import os
import shutil
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

import minidist as md
from minidist.instruments import compare
from minidist.instruments.compare import tool_systems
from minidist.instruments.compare.build_locks import stale

pytestmark = pytest.mark.soak  # by day the notebook of the lesson real_tools runs them

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
def test_a_system_trains_as_one_process_does(found):
    """Weights and losses of three steps with SGD, in float64; DeepSpeed computes in float32. The
    loss after five steps with Adam, in float32, too."""
    rows, alone = found[0], found[0]["one process"]
    assert {name: row.problem for name, row in rows.items() if row.problem} == {}
    for name in NAMES:
        row = rows[name]
        allowed = {"float64": 1e-12, "float32": 1e-6}[row.exact]
        assert row.difference < allowed, name
        assert (row.exact == "float32") == name.startswith("DeepSpeed")
        assert math.isclose(row.loss, alone.loss, rel_tol=1e-5), name
        assert row.peer and row.seconds > 0


@pytest.mark.tools
def test_bytes_are_counted_and_states_shared_out(found):
    """Adam's two states on the fullest rank: from stage 1 on a third of them, as near as whole
    tensors allow. DeepSpeed has a copy of its parameters among them."""
    parameters = sum(p.numel() for p in mlp().parameters())
    for name in NAMES:
        row, stage = found[0][name], 0 if name.endswith("DDP") else int(name[-1])
        assert 0 <= row.sent - SENT[name] * 2 / 3 * 4 * parameters < BESIDES, name
        assert row.planned == md.planner.traffic(parameters, 3, stage, precision="float32"), name
        kinds = 3 if name.startswith("DeepSpeed") and stage else 2
        whole = kinds * 4 * parameters
        held = row.memory["optimizer states"]
        assert held == pytest.approx(whole / (3 if stage else 1), rel=0.1), name


@pytest.mark.tools
def test_nothing_is_left_behind(found):
    assert found[1] == set()


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
