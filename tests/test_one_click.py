"""Ways in without an installation of one's own: the dev container, and the first cell for Colab."""

import json
import os
import re
import subprocess
import textwrap
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]


def test_the_dev_container_makes_the_environment() -> None:
    text = (ROOT / ".devcontainer/devcontainer.json").read_text()
    container = json.loads(text)  # also without the comments that some readers allow
    known = {"name", "image", "hostRequirements", "runArgs", "postCreateCommand", "forwardPorts"}
    assert container.keys() == known | {"customizations"}
    assert re.fullmatch(r"python:3\.11-\w+", container["image"])  # what the constraints are for
    assert container["runArgs"] == ["--shm-size=2g"]  # Docker gives 64 MB: the start page, too
    assert "--shm-size=2g" in (ROOT / "notebooks/00_start.ipynb").read_text()
    assert container["postCreateCommand"] == "make setup"
    editor = container["customizations"]["vscode"]
    python = editor["settings"]["python.defaultInterpreterPath"]
    assert python == "${containerWorkspaceFolder}/.venv/bin/python"


@pytest.mark.soak
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="clones the course")
def test_the_first_cell_for_colab_makes_a_lesson_run(tmp_path: Path) -> None:
    """In a kernel that has the dependencies, as Colab does, and not minidist."""
    readme = (ROOT / "README.md").read_text()
    (cell,) = re.findall(r"```\n( *!git clone.*?)```", readme, re.DOTALL)
    cell, address = textwrap.dedent(cell), "<the address of this repository>"
    assert address in cell
    site, here = tmp_path / "site", tmp_path / "content"
    site.mkdir()
    here.mkdir()
    # Of pip's work only the installing of minidist: nothing is fetched, and into another folder.
    # ("0": pip reads this one the other way round.)
    pip = dict(PIP_TARGET=str(site), PIP_NO_DEPS="1", PIP_NO_BUILD_ISOLATION="0", PIP_NO_INDEX="1")
    cell = re.sub(r"^(%pip install -q \.\.).*", r"\1", cell, flags=re.MULTILINE)
    lesson = nbformat.read(ROOT / "notebooks/01_rank.ipynb", as_version=4)
    first = next(each.source for each in lesson.cells if each.cell_type == "code")
    checks = "print(md.__file__, Path.cwd(), os.environ['MINIDIST_TIMING'], sep='\\n')"
    ranks = "%%ranks -n 2\nimport minidist\nprint(minidist.__file__)"
    cells = [cell.replace(address, str(ROOT)), first, checks, ranks]
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)])
    environ = {k: v for k, v in os.environ.items() if k != "MINIDIST_TIMING"}
    NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        coalesce_streams=True,
        resources={"metadata": {"path": str(here)}},
    ).execute(env={**environ, **pip, "PYTHONPATH": str(site)})
    installed = str(site / "minidist/__init__.py")
    told, ranked = (each.outputs[0].text for each in notebook.cells[2:])
    assert told.split() == [installed, str(here / "minidist/notebooks"), "soft"]
    assert ranked == "".join(f"[rank {rank}] {installed}\n" for rank in range(2))


def test_make_browser_is_not_in_the_gate() -> None:
    def dry(*target: str) -> str:
        old = [f"--old-file=.venv/{made}" for made in (".ready", ".test", ".tools")]
        command = ["make", "--dry-run", *old, *target]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout

    assert "tests/test_browser*.py -m browser" in dry("browser") and "[browser]" in dry("browser")
    tested = dry("test", "WITHOUT_TOOLS=1")
    assert tested and "[browser]" not in tested and "test_browser" not in tested
