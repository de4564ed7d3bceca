"""`make notebooks` writes what `make test` then finds."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbconvert import HTMLExporter
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
LOAD = "%load_ext minidist\nimport matplotlib.pyplot as plt\nimport minidist as md"


def write(path: Path, *cells: NotebookNode, **metadata: object) -> None:
    nbformat.write(nbformat.v4.new_notebook(cells=list(cells), metadata=metadata), path)


def code(source: str, **metadata: object) -> NotebookNode:
    return nbformat.v4.new_code_cell(source, metadata=metadata)


def python(*command: object) -> subprocess.CompletedProcess[str]:
    """Run as from a shell: without the variable that pytest has set around this test."""
    env = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)


@pytest.mark.soak
def test_an_executed_notebook_carries_no_noise_and_a_failing_one_is_left(tmp_path: Path) -> None:
    path = tmp_path / "lesson.ipynb"
    cells = [
        nbformat.v4.new_markdown_cell("# A lesson"),
        code("import os, pathlib\npathlib.Path.cwd().name == '" + tmp_path.name + "'"),
        code("print('seen')\nos.system('echo hidden, as under nbval')"),
        code(f"{LOAD}\nmd.plot.loss({{'ring': [2, 1]}})\nplt.show()", collapsed=True),
        code("import json\njson.loads('{')", tags=["raises-exception"]),
    ]
    write(path, *cells, widgets={"state": {}}, language_info={"name": "python", "version": "9.9"})

    bad = tmp_path / "bad.ipynb"
    write(bad, code("print(1)"), code("raise ValueError('not meant')"))
    before = bad.read_text()

    result = python("notebooks/execute.py", bad, path)
    assert result.returncode == 1, result.stderr
    assert "bad.ipynb: FAILED" in result.stderr and "not meant" in result.stderr
    assert bad.read_text() == before
    assert "lesson.ipynb: " in result.stdout and "1 of 2" in result.stdout

    done = nbformat.read(path, as_version=4)
    assert [cell.id for cell in done.cells] == [cell.id for cell in cells]
    assert [cell.execution_count for cell in done.cells[1:]] == [1, 2, 3, 4]
    assert set(done.metadata) == {"kernelspec", "language_info"}
    assert "version" not in done.metadata.language_info
    assert [dict(cell.metadata) for cell in done.cells] == [{}] * 4 + [
        {"tags": ["raises-exception"]}
    ]

    where, hidden, figure, error = (cell.outputs for cell in done.cells[1:])
    assert where[0].data["text/plain"] == "True"
    assert [output.get("text") for output in hidden] == ["seen\n", None]
    assert "image/png" in figure[0].data and set(figure[0].metadata) == {"image/png"}
    assert figure[0].metadata["image/png"].keys() == {"alt"}
    assert figure[0].metadata["image/png"].alt.startswith("Lines: Loss. Across: step 1 to 2.")
    page, _ = HTMLExporter(template_name="classic").from_notebook_node(done)
    assert 'alt="Lines: Loss. Across: step 1 to 2. ' in page
    traceback = "\n".join(error[0].traceback)
    assert "json/decoder.py" in traceback and sys.base_prefix not in traceback


def test_a_path_in_a_traceback_begins_in_the_repository_or_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever the environment lies: in the repository, beside it, or around it."""
    monkeypatch.syspath_prepend(ROOT / "notebooks")
    import execute

    monkeypatch.setattr(execute, "HERE", Path("/home/ada/course/notebooks"))
    monkeypatch.setenv("HOME", "/home/ada")
    for environment in "/home/ada/course/.venv", "/home/ada/.venv", "/home":
        monkeypatch.setattr(sys, "prefix", environment)
        for path, shown in {
            f"{environment}/lib/torch/_tensor.py:623": "lib/torch/_tensor.py:623",
            "/home/ada/course/minidist/rank.py:1": "minidist/rank.py:1",
            "~/course/minidist/rank.py:1": "minidist/rank.py:1",
        }.items():
            assert execute.shorten_paths(f"File {path}, in f") == f"File {shown}, in f"
