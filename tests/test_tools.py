"""The lesson real_tools: how its systems are installed, compiled, done without, and cleaned up."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import needs
import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "notebooks/scripts/build_deepspeed.py"
(LESSON,) = ROOT.glob("notebooks/*_real_tools.ipynb")


def run(*command: object, **environ: str) -> subprocess.CompletedProcess[str]:
    # A make within `make test` says where it is.
    from_make = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "WITHOUT_TOOLS")
    kept = {name: value for name, value in os.environ.items() if name not in from_make}
    words = [str(part) for part in command]
    options = dict(capture_output=True, text=True, timeout=200)
    return subprocess.run(words, cwd=ROOT, env=kept | environ, **options)


# ---- make ---------------------------------------------------------------------------------


def test_make_test_asks_for_a_compiler_first_and_compiles_before_it_tests():
    lines = run("make", "--dry-run", "test", "VENV=no-such-folder").stdout
    steps = ["command -v g++", "ruff check", "[tools]", "build_deepspeed.py", "-m pytest"]
    places = [lines.find(step) for step in steps]
    assert places == sorted(places) and places[0] >= 0, lines
    lab = run("make", "--dry-run", "lab").stdout
    assert "jupyter" in lab and not re.search("tools|deepspeed|g\\+\\+", lab)


def test_without_a_compiler_one_sentence_says_so(monkeypatch):
    found = run("make", "test", "CXX=no-such-compiler", "VENV=no-such-folder")
    assert found.returncode == 2
    assert found.stdout.startswith("make test needs a C++ compiler") and "g++" in found.stdout
    assert len(found.stdout.splitlines()) == 1 and not (ROOT / "no-such-folder").exists()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SystemExit, match="^DeepSpeed needs a C\\+\\+ compiler: install .*$"):
        runpy.run_path(str(BUILD), run_name="__main__")


@pytest.fixture
def half_made(tmp_path):
    """An environment that has all but the tools, in which pip fails as it does without a net."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python"
    python.write_text("#!/bin/sh\necho 'ERROR: No matching distribution found' >&2\nexit 1\n")
    python.chmod(0o755)
    for made in (".ready", ".test"):
        (tmp_path / made).touch()
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
    assert "-m pytest" in lines and "ruff check" in lines
    assert not re.search(r"\[tools\]|build_deepspeed|command -v", lines)
    lab = run("make", "--dry-run", "lab", half_made).stdout
    assert "jupyter lab" in lab and "pip install" not in lab


# ---- what is skipped ----------------------------------------------------------------------


def reasons(path, **marks):
    """Why a test at this path, with these marks, is skipped."""
    added = []
    item = SimpleNamespace(path=ROOT / path, add_marker=added.append, get_closest_marker=marks.get)
    needs.pytest_collection_modifyitems([item])
    assert all(mark.name == "skip" for mark in added)
    return [mark.args[0] for mark in added]


def test_without_tools_the_lesson_and_what_needs_them_is_skipped_and_says_why(monkeypatch):
    here, lesson = "tests/test_tools.py", f"notebooks/{LESSON.name}"
    for how in "WITHOUT_TOOLS", "not installed":
        with monkeypatch.context() as patch:
            if how == "WITHOUT_TOOLS":
                patch.setenv(how, "1")
            else:
                patch.setattr(needs, "find_spec", lambda name: None)
            for found in reasons(here, tools=pytest.mark.tools), reasons(lesson):
                assert len(found) == 1 and needs.GET_TOOLS in found[0], (how, found)
            assert reasons(f"notebooks/solutions/{LESSON.name}") == [] == reasons(here)


def test_without_the_extra_the_lesson_says_in_one_line_how_to_get_it(monkeypatch):
    cells = [c.source for c in nbformat.read(LESSON, 4).cells if c.cell_type == "code"]
    first = cells[0].replace("%load_ext minidist", "")
    needed = re.search(r"^TOOLS = (.*)$", first, re.MULTILINE)[1]
    assert set(eval(needed)) == set(needs.TOOLS)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError) as told:
        exec(first, {})
    assert needs.GET_TOOLS in str(told.value) and "\n" not in str(told.value)


# ---- locks --------------------------------------------------------------------------------


def test_a_lock_that_nobody_holds_is_removed(tmp_path):
    """And no other: who builds has it open."""
    remove_stale = runpy.run_path(str(BUILD))["remove_stale"]
    left, held = tmp_path / "one/lock", tmp_path / "other/lock"
    for lock in left, held:
        lock.parent.mkdir()
    left.touch()
    with held.open("x"):
        remove_stale(tmp_path)
        assert not left.exists() and held.exists()
    remove_stale(tmp_path)
    assert not held.exists()


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


@pytest.mark.soak
@pytest.mark.tools
def test_the_traps_that_a_lesson_tells_of_are_still_there():
    found = run(sys.executable, ROOT / "notebooks/scripts/traps.py")
    assert found.returncode == 0, found.stdout + found.stderr


# ---- with it ------------------------------------------------------------------------------


@pytest.mark.parametrize("lacking", ["python uv", "uv torch"])  # uv itself, or its index of torch
def test_without_uv_or_its_torch_pip_takes_torch_and_make_says_so(tmp_path, lacking):
    """The first commands of a newcomer, with programs that only say how they were called."""
    (tmp_path / "bin").mkdir()
    for name in "python", "uv":
        program, (caller, word) = tmp_path / "bin" / name, lacking.split()
        ends = f'case "{name} $*" in "{caller} "*" {word}") exit 1; esac'
        program.write_text(f'#!/bin/sh\necho "{name} $@" >> "$0.log"\n{ends}\n')
        program.chmod(0o755)
    found = run("make", f"{tmp_path}/.ready", f"VENV={tmp_path}", "PYTHON=true")
    assert found.returncode == 0 and found.stdout.count("There is no torch by uv") == 1
    called = tmp_path / "bin/uv.log"
    assert lacking == "python uv" or "--torch-backend=auto" in called.read_text()
    by_pip = (tmp_path / "bin/python.log").read_text().splitlines()
    assert [line.split()[-1] for line in by_pip] == ["uv", "torch", ".[course]"]
