"""The lesson real_tools: how its systems are installed, compiled, done without, and cleaned up."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import nbformat
import needs
import pytest

from minidist.compare.build_locks import stale

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "notebooks/scripts/build_deepspeed.py"
(LESSON,) = ROOT.glob("notebooks/*_real_tools.ipynb")


def run(*command: object, **environ: str) -> subprocess.CompletedProcess[str]:
    from_make = (
        "MAKEFLAGS",
        "MAKELEVEL",
        "MFLAGS",
        "MAKEOVERRIDES",
        "WITHOUT_TOOLS",
    )  # a make within `make test` says where it is
    kept = {name: value for name, value in os.environ.items() if name not in from_make}
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=kept | environ,
        capture_output=True,
        text=True,
        timeout=200,
    )


# ---- make ---------------------------------------------------------------------------------


def test_make_test_compiles_before_it_tests_and_asks_for_a_compiler_first():
    lines = run("make", "--dry-run", "test", "VENV=no-such-folder").stdout
    steps = ["command -v g++", "ruff check", "[tools]", "build_deepspeed.py", "tests/gate.py"]
    places = [lines.find(step) for step in steps]
    assert places == sorted(places) and places[0] >= 0, lines


def test_make_lab_needs_no_tools():
    lines = run("make", "--dry-run", "lab").stdout
    assert "jupyter" in lines and not re.search("tools|deepspeed|g\\+\\+", lines)


def test_without_a_compiler_make_test_says_so_and_does_nothing_else():
    found = run("make", "test", "CXX=no-such-compiler", "VENV=no-such-folder")
    assert found.returncode == 2
    assert found.stdout.startswith("make test needs a C++ compiler") and "g++" in found.stdout
    assert len(found.stdout.splitlines()) == 1 and not (ROOT / "no-such-folder").exists()


@pytest.fixture
def half_made(tmp_path):
    """An environment that has all but the tools, in which pip fails as it does without a net."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python"
    python.write_text("#!/bin/sh\necho 'ERROR: No matching distribution found' >&2\nexit 1\n")
    python.chmod(0o755)
    (tmp_path / ".ready").touch()
    return f"VENV={tmp_path}"


def test_if_the_tools_cannot_be_installed_make_says_what_works_without(half_made):
    target = half_made.partition("=")[2] + "/.tools"
    found = run("make", target, half_made)
    assert found.returncode == 2 and "No matching distribution found" in found.stderr
    assert found.stdout.count("The systems of the lesson real_tools are not there") == 1
    assert "make lab" in found.stdout and "make test WITHOUT_TOOLS=1" in found.stdout
    assert not Path(target).exists()  # so that the next make test tries again


def test_without_tools_make_test_asks_for_none_of_them(half_made):
    lines = run("make", "--dry-run", "test", half_made, "WITHOUT_TOOLS=1").stdout
    assert "tests/gate.py" in lines and "ruff check" in lines
    assert not re.search(r"\[tools\]|build_deepspeed|command -v", lines)
    lab = run("make", "--dry-run", "lab", half_made).stdout
    assert "jupyter lab" in lab and "pip install" not in lab


def test_without_tools_nothing_of_them_is_tested(monkeypatch):
    monkeypatch.setenv("WITHOUT_TOOLS", "1")
    marks = []
    item = SimpleNamespace(
        path=ROOT / "tests/test_tools.py",
        add_marker=marks.append,
        get_closest_marker=lambda name: pytest.mark.tools if name == "tools" else None,
    )
    needs.pytest_collection_modifyitems([item])
    assert [mark.name for mark in marks] == ["skip"]


@pytest.mark.parametrize("torch, skipped", [("2.11.0+cpu", True), ("2.12.0", False)])
def test_what_an_older_torch_lacks_is_skipped_and_says_why(monkeypatch, torch, skipped):
    monkeypatch.setattr(needs, "version", {"torch": torch}.get)
    marks, word = [], pytest.mark.newer_torch("fused").mark
    item = SimpleNamespace(
        path=ROOT / "tests/test_tools.py",
        add_marker=marks.append,
        get_closest_marker=lambda name: word if name == "newer_torch" else None,
    )
    needs.pytest_collection_modifyitems([item])
    reasons = [mark.args[0] for mark in marks]
    assert len(reasons) == skipped and all("needs torch 2.12: " in each for each in reasons)


def test_without_a_compiler_the_script_says_so():
    found = run(sys.executable, BUILD, CXX="no-such-compiler")
    assert found.returncode == 1 and found.stderr.startswith("DeepSpeed needs a C++ compiler")
    assert len(found.stderr.splitlines()) == 1


def test_a_lock_that_nobody_holds_is_removed_before_the_build(tmp_path, monkeypatch):
    locked = tmp_path / "private/some_extension/lock"
    locked.parent.mkdir(parents=True)
    locked.touch()
    seen = []

    class Builder:
        def load(self, verbose):
            seen.append((locked.exists(), os.environ["TORCH_EXTENSIONS_DIR"]))

    fake = ModuleType("deepspeed.accelerator")
    fake.get_accelerator = lambda: SimpleNamespace(create_op_builder=lambda name: Builder())
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", fake)
    for name in ("PATH", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "private"))
    runpy.run_path(str(BUILD))["build"]()
    assert seen == [(False, str(tmp_path / "private"))]


# ---- versions -----------------------------------------------------------------------------

PINNED = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.M))
SAID = re.compile(r"(?<![Ss]ince )\b([A-Z]?[a-z]+[A-Z]?[a-z]+(?: Core)?) (\d+\.\d+(?:\.\d+)*)\b")
OTHERS = {"Megatron Core": "0.19.2"}


def versions(text):
    """(system, version) of each system that is pinned, or stands in OTHERS."""
    pinned = {name.lower() for name in PINNED} - {"python"}
    return [pair for pair in SAID.findall(text) if pair[0].lower() in pinned or pair[0] in OTHERS]


def differing(text):
    """Versions that are not the pinned one, or its beginning."""
    known = {name.lower(): version for name, version in (PINNED | OTHERS).items()}
    for name, version in versions(text):
        if not f"{known[name.lower()]}.".startswith(f"{version}."):
            yield f"{name} {version}"


def test_lessons_name_the_versions_that_are_pinned():
    lessons = sorted(ROOT.glob("notebooks/*.ipynb"))
    texts = {}
    for path in lessons:
        cells = nbformat.read(path, 4).cells
        texts[path.name] = "\n".join(c.source for c in cells if c.cell_type == "markdown")
    assert {name: found for name, text in texts.items() if (found := [*differing(text)])} == {}
    assert sum(len(versions(text)) for text in texts.values()) > 20
    names = {name.lower() for text in texts.values() for name, _ in versions(text)}
    assert names > {"torch", "fairscale", "deepspeed", "transformers", "lightning", "megatron core"}
    assert [*differing("| DeepSpeed 0.18 | since torch 2.0, torch 2.13; torch 2.1")] == [
        "DeepSpeed 0.18",
        "torch 2.1",
    ]


# ---- without the extra --------------------------------------------------------------------


def test_without_the_extra_the_lesson_says_in_one_line_how_to_get_it(monkeypatch):
    cells = [c.source for c in nbformat.read(LESSON, 4).cells if c.cell_type == "code"]
    first = cells[0].replace("%load_ext minidist", "")
    needed = re.search(r"^TOOLS = (.*)$", first, re.MULTILINE)[1]
    assert set(eval(needed)) == set(needs.TOOLS)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError) as told:
        exec(first, {})
    assert needs.GET_TOOLS in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize("folder, skipped", [("notebooks", True), ("notebooks/solutions", False)])
def test_without_the_extra_the_lesson_is_skipped_and_says_why(monkeypatch, folder, skipped):
    monkeypatch.setattr(needs, "find_spec", lambda name: None)
    marks = []
    item = SimpleNamespace(
        path=ROOT / folder / LESSON.name,
        cell=SimpleNamespace(metadata={}),
        add_marker=marks.append,
        get_closest_marker=lambda name: None,
    )
    needs.pytest_collection_modifyitems([item])
    reasons = [mark.args[0] for mark in marks]
    assert len(reasons) == skipped and all(needs.GET_TOOLS in reason for reason in reasons)


def test_without_tools_the_lesson_is_skipped_where_it_is_tested_alone():
    found = run(sys.executable, ROOT / "tests/gate.py", LESSON, WITHOUT_TOOLS="1")
    assert found.returncode == 0 and f"needs {needs.TOOLS[0]}" in found.stdout, found.stdout


# ---- with it ------------------------------------------------------------------------------

TRAIN = """
import os, sys
os.environ |= {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": f"{sys.prefix}/torch_extensions"}
os.environ["PATH"] = f"{sys.prefix}/bin:{os.environ['PATH']}"
import torch
import minidist as md

def step():
    import deepspeed
    model = torch.nn.Linear(4, 4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = {"stage": 2, "reduce_bucket_size": 1000}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
    engine = deepspeed.initialize(
        model=model, optimizer=sgd, config=config | {"zero_optimization": zero}
    )[0]
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()

if __name__ == "__main__":
    with md.ranks(2, timeout=100) as r:
        r(step)
    print("trained")
"""


@pytest.mark.tools
def test_deepspeed_leaves_nothing_behind(tmp_path):
    def there():
        private = Path(sys.prefix, "torch_extensions")
        return {*Path("/dev/shm").glob("*deepspeed*"), *stale(private)}

    before = there()
    (tmp_path / "train.py").write_text(TRAIN)
    found = run(sys.executable, tmp_path / "train.py", PYTHONPATH=str(ROOT))
    assert "trained" in found.stdout, found.stderr
    assert there() <= before
