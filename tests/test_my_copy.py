"""`make lab` opens a copy of the lessons that belongs to the learner."""

import importlib.util
import inspect
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import get_kernel_spec
from jupyter_client.manager import run_kernel

from minidist.course.checks import solved
from minidist.machine import notebook

ROOT = Path(__file__).resolve().parents[1]
LESSONS = {"00_start.ipynb", "01_rank.ipynb", "solutions/01_rank.ipynb", "AGENTS.md"}
LESSONS |= {"ko/00_start.ipynb", "ko/glossary.md"}
NOT_LESSONS = {"execute.py", "notes.md"}


def edition(which):
    """A file of the course, in a form that a notebook may have."""
    return json.dumps({"cells": [f"{which} edition"]})


@pytest.fixture
def course(tmp_path):
    """A course of two lessons; its script as a module."""
    there = tmp_path / "notebooks"
    (there / "solutions").mkdir(parents=True)
    (there / "ko").mkdir()
    for name in LESSONS | NOT_LESSONS:
        (there / name).write_text(edition("first"))
    shutil.copy(ROOT / "notebooks/my_copy.py", there)
    spec = importlib.util.spec_from_file_location("my_copy", there / "my_copy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_lessons_are_copied_and_nothing_else(course, tmp_path):
    my = tmp_path / "my"
    assert course.copy_into(my) == []
    there = {str(path.relative_to(my)) for path in my.rglob("*") if path.is_file()}
    assert there == LESSONS | {".copied.json"}


def test_what_the_learner_changed_is_kept_and_the_rest_follows_the_course(course, tmp_path):
    my = tmp_path / "my"
    course.copy_into(my)
    (my / "01_rank.ipynb").write_text("mine")
    (my / "notes.ipynb").write_text("mine, too")
    assert course.copy_into(my) == []  # the course has not changed

    for name in ("00_start.ipynb", "01_rank.ipynb"):
        (course.HERE / name).write_text(edition("second"))
    for _ in range(2):
        assert course.copy_into(my) == [Path("01_rank.ipynb")]
        assert (my / "01_rank.ipynb").read_text() == "mine"
        assert "second edition" in (my / "00_start.ipynb").read_text()
    (my / "01_rank.ipynb").unlink()  # how to get a lesson anew
    assert course.copy_into(my) == []
    assert "second edition" in (my / "01_rank.ipynb").read_text()
    assert (my / "notes.ipynb").read_text() == "mine, too"


def test_a_lesson_that_moved_leaves_only_a_changed_copy_behind(course, tmp_path):
    my = tmp_path / "my"
    course.copy_into(my)
    (my / "solutions/01_rank.ipynb").write_text("mine")
    for name in ("01_rank.ipynb", "solutions/01_rank.ipynb"):
        (course.HERE / name).rename(course.HERE / name.replace("rank", "moved"))
    course.copy_into(my)
    there = {str(path.relative_to(my)) for path in my.rglob("*") if path.is_file()}
    moved = {"01_moved.ipynb", "solutions/01_moved.ipynb"}
    assert there == LESSONS - {"01_rank.ipynb"} | moved | {".copied.json"}


def test_what_is_solved_is_kept_by_the_checks_and_by_an_update(course, tmp_path, monkeypatch):
    my = tmp_path / "my"
    course.copy_into(my)
    for folder, kept in (my, True), (my / "solutions", False), (course.HERE, False):
        monkeypatch.chdir(folder)
        solved.remember("rank", "two_tokens")
        assert (folder / solved.SOLVED).exists() is kept
    written = (my / solved.SOLVED).read_text()
    (course.HERE / "01_rank.ipynb").write_text(edition("second"))
    for _ in range(2):
        assert course.copy_into(my) == []
    assert "second edition" in (my / "01_rank.ipynb").read_text()
    assert (my / solved.SOLVED).read_text() == written and "two_tokens" in written


def test_a_lesson_that_jupyterlab_opens_and_saves_is_unchanged(tmp_path):
    """At its opening JupyterLab writes into a notebook which kernel it has, and what that says."""
    runpy.run_path(str(ROOT / "notebooks/my_copy.py"))["copy_into"](tmp_path)
    lesson = tmp_path / "01_rank.ipynb"
    before, notebook = lesson.read_bytes(), nbformat.read(lesson, as_version=4)
    spec = get_kernel_spec("python3").to_dict()
    named = {"name": "python3", "display_name": spec["display_name"], "language": spec["language"]}
    with run_kernel() as client:
        answer = client.kernel_info(reply=True, timeout=60)["content"]
    notebook.metadata = {"kernelspec": named, "language_info": answer["language_info"]}
    nbformat.write(nbformat.from_dict(notebook), lesson)
    assert lesson.read_bytes() == before


def test_the_settings_of_make_lab_are_such_as_jupyterlab_knows():
    schemas = Path(sys.prefix) / "share/jupyter/lab/schemas"
    settings = ROOT / "notebooks/jupyter/labconfig/default_setting_overrides.json"
    for plugin, values in json.loads(settings.read_text()).items():
        package, name = plugin.split(":")
        schema = json.loads((schemas / package / f"{name}.json").read_text())
        assert values.keys() <= schema["properties"].keys(), plugin


def test_an_assistant_is_told_what_is_there(tmp_path):
    """Its words are true of a learner's copy: what it names in code exists there."""
    course = runpy.run_path(str(ROOT / "notebooks/my_copy.py"))
    course["copy_into"](tmp_path / "my")
    for name in ("minidist", ".venv"):
        (tmp_path / name).symlink_to(ROOT / name)
    words = (tmp_path / "my/AGENTS.md").read_text()
    named = re.findall(r"`((?:\.\./)?[\w./]*(?:/|\.ipynb))`", words)
    assert {"solutions/", "../minidist/course/checks/", "00_start.ipynb"} <= set(named)
    assert [name for name in named if not (tmp_path / "my" / name).exists()] == []
    options = re.findall(r"`(--\w+)", words)
    assert [each for each in options if each not in inspect.getsource(notebook)] == []
    assert "solutions/` for the learner" in words and "MINIDIST_TIMING=soft" in words


def test_git_ignores_the_copy_and_make_lab_opens_it():
    def run(*command):
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert run("git", "check-ignore", "-q", "my/01_rank.ipynb").returncode == 0
    lab = run("make", "--dry-run", "--old-file=.venv/.ready", "lab").stdout
    assert "my_copy.py" in lab and "/lab/tree/my/00_start.ipynb" in lab
    author = run("make", "-n", "--old-file=.venv/.ready", "lab", "LAB_NOTEBOOKS=notebooks").stdout
    assert "my_copy.py" not in author and "/lab/tree/notebooks/00_start.ipynb" in author
