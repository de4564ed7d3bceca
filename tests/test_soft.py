"""MINIDIST_TIMING=soft: a time that misses prints, everything else fails as ever."""

import ast
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from minidist.instruments.measure.soft import NOT_TIMED, assertions, rounds, timed

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
NOTEBOOKS += sorted(ROOT.glob("notebooks/[mst]*/*.ipynb"))  # the museum, solutions, traces


def code(source: str, *tags: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_code_cell(source, metadata={"tags": list(tags)} if tags else {})


LESSON = {  # what a cell is about: the cell; "\nprint('on')" follows in each
    "load": code("%load_ext minidist"),
    "time": code("seconds = 2.0\nassert 0 < seconds < 1, 'is it busy?'\nprint('on')", "alone"),
    "several times": code("r = %pwd\nnear = False\nassert near\nprint('on')", "alone"),
    "a time in a function": code(
        "def slow(ms):\n    assert ms < 1\n    return ms\nprint(slow(3))\nprint('on')", "alone"
    ),
    "a time on the ranks": code(
        "import minidist as md\nmd.launch(slow, 5, world_size=2)\nprint('on')", "alone"
    ),
    "equality": code("assert 1 == 2\nprint('on')", "alone"),
    "equal tensors": code(
        "import torch\nassert torch.equal(torch.ones(1), torch.zeros(1))\nprint('on')", "alone"
    ),
    "bytes": code(f"sent = 7\nassert sent < 3  {NOT_TIMED}\nprint('on')", "alone"),
    "a loss": code("loss = 5.0\nassert loss < 1\nprint('on')"),
    "an error": code("assert {}['ms'] < 1\nprint('on')", "alone"),
}
TIMES = {"time", "several times", "a time in a function", "a time on the ranks"}


def shown(folder: Path) -> dict[str, str]:
    """What each cell prints, or the name of its error."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.from_dict(c) for c in LESSON.values()])
    nbformat.write(notebook, folder / "lesson.ipynb")
    NotebookClient(
        notebook,
        timeout=60,
        kernel_name="python3",
        allow_errors=True,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    said = {}
    for name, cell in zip(LESSON, notebook.cells, strict=True):
        said[name] = "".join(out.get("text", out.get("ename", "")) for out in cell.outputs)
    return said


def test_soft_prints_what_missed_and_softens_nothing_else(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MINIDIST_TIMING", "soft")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # as for a learner
    soft = shown(tmp_path)
    missed = "missed on this machine (MINIDIST_TIMING=soft): "
    assert soft["time"] == f"{missed}0 < seconds < 1\non\n"
    assert soft["several times"] == f"{missed}near\non\n"
    assert soft["a time in a function"] == f"{missed}ms < 1\n3\non\n"
    assert (
        soft["a time on the ranks"]
        == "".join(f"[rank {rank}] {missed}ms < 1\n" for rank in range(2)) + "on\n"
    )
    errors = {name for name, said in soft.items() if said.endswith("Error")}
    assert errors == set(LESSON) - {"load"} - TIMES


def test_nbval_does_not_meet_the_sentence_among_the_outputs(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MINIDIST_TIMING", "soft")
    soft = shown(tmp_path)
    assert {soft[name].removeprefix("3\n") for name in TIMES} == {"on\n"}


@pytest.mark.soak
def test_without_soft_every_assertion_fails(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("MINIDIST_TIMING", raising=False)
    hard = shown(tmp_path)
    assert {name for name, said in hard.items() if said.endswith("Error")} == set(LESSON) - {"load"}


def test_of_the_lessons_no_assertion_is_softened_by_the_words_of_another() -> None:
    """They are told apart by their text: in no cell may one stand that is not about a time."""
    soft, hard = set(), {}
    for path in NOTEBOOKS:
        soft |= {ast.unparse(found.test) for found in timed(path)}
        for cell in nbformat.read(path, as_version=4).cells:
            alone = "alone" in cell.metadata.get("tags", [])
            if cell.cell_type == "code":
                for found, about_time in assertions(cell.source):
                    if not (alone and about_time):
                        hard[ast.unparse(found.test)] = path.stem
    assert len(soft) > 50 and len(hard) > 50
    assert {text: hard[text] for text in soft & hard.keys()} == {}


def test_with_soft_times_a_loop_takes_as_few_rounds_as_it_may(monkeypatch) -> None:
    monkeypatch.delenv("MINIDIST_TIMING", raising=False)
    assert [*rounds(1, 5)] == [0, 1, 2, 3, 4] and [*rounds(2, seconds=0)] == [0, 1]
    assert next(n for n in rounds(2) if n == 7) == 7
    monkeypatch.setenv("MINIDIST_TIMING", "soft")
    assert [*rounds(1, 5)] == [0] and [*rounds(2, seconds=100)] == [0, 1]
