"""How `make test` judges: what is alone, what runs again, and what is only busy."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import alone
import gate
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output
from nbval.plugin import NbCellError

import minidist as md

# A test that fails in as many runs as it is told, and then passes; it says when it ran.
TEST = """
import time
from pathlib import Path
import pytest

@pytest.mark.parametrize("fails", FAILS)
def test(fails):
    runs = Path(__file__ + f".{fails}.runs")
    with runs.open("a") as file:
        print("run", file=file)
    assert len(runs.read_text().split()) > fails, "not yet"

@pytest.mark.alone
def test_alone():
    Path(__file__ + ".alone").write_text(str(time.monotonic()))
"""


@pytest.fixture
def judged(tmp_path):
    """Run the gate over files of tests, {name: how often each test fails}, and notebooks."""
    here = Path(__file__).parent
    for folder in ("tests", "notebooks"):
        (tmp_path / folder).mkdir()
    shutil.copy(here.parent / "notebooks" / "sanitize.cfg", tmp_path / "notebooks")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -ra\nmarkers =\n  alone\n  soak\n")

    def judged(files, cells=(), **sources):
        for name, source in sources.items():
            (tmp_path / "tests" / f"{name}.py").write_text(source)
        for name, fails in files.items():
            (tmp_path / "tests" / f"test_{name}.py").write_text(TEST.replace("FAILS", str(fails)))
        if cells:
            nbformat.write(new_notebook(cells=list(cells)), tmp_path / "notebooks" / "a.ipynb")
        environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        environ["WORKERS"] = "1"
        ran = subprocess.run(
            [sys.executable, gate.__file__],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
        )
        return ran.returncode, ran.stdout + ran.stderr

    judged.runs = lambda name, fails: len(
        (tmp_path / "tests" / f"test_{name}.py.{fails}.runs").read_text().split()
    )
    return judged


def test_what_fails_once_is_flaky_and_said_with_its_failure(judged):
    code, said = judged({"a": [0, 1], "b": [1]})
    assert code == 0
    assert judged.runs("a", 1) == judged.runs("b", 1) == 4  # once red, three times green
    assert judged.runs("a", 0) == 1 and "flaky: tests/test_a.py::test[0]" not in said
    end = said[said.rindex("passed in") :]
    for name in "ab":
        assert f"flaky: tests/test_{name}.py::test[1]\nAssertionError: not yet" in end


def test_what_fails_again_has_failed(judged):
    code, said = judged({"a": [0, 2]})
    assert code == 1 and "failed again: tests/test_a.py::test[2]" in said
    assert judged.runs("a", 2) == 2


def test_where_four_files_fail_none_runs_again(judged):
    code, said = judged(dict.fromkeys("abcd", [1]))
    assert code == 1 and "none runs again" in said
    assert judged.runs("a", 1) == 1


def test_tests_that_cannot_be_collected_fail(judged):
    assert judged({"a": "nonsense"})[0] not in (0, 5)


@pytest.mark.parametrize("when", ["collects", "runs"])
def test_a_worker_that_dies_fails(judged, when):
    dies = "import os; os._exit(3)"
    source = dies if when == "collects" else f"def test(): {dies}"
    code, said = judged({"a": [0]}, test_b=source)
    assert code not in (0, 5) and "runs again" not in said and "Alone, in a new" not in said


def cell(source, printed, *tags):
    outputs = [new_output("stream", name="stdout", text=f"{printed}\n")] if printed else []
    return new_code_cell(source, outputs=outputs, execution_count=1, metadata={"tags": list(tags)})


def test_a_notebook_runs_again_whole(judged):
    count = "file = open('runs', 'a+')\nn = file.write('x') and file.tell()"
    code, said = judged({"a": [0]}, [cell(count, ""), cell("print('ok' if n > 1 else 'no')", "ok")])
    assert code == 0 and "flaky: notebooks/a.ipynb\n" in said


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_what_is_measured_on_a_busy_machine_is_not_judged(judged, tmp_path, share):
    conftest = f"from minidist.bench.quiet import Moment\nMoment.share = lambda moment: {share}\n"
    time = "import pytest\n@pytest.mark.alone\ndef test_time(): assert 2 < 1\n"
    cells = [
        cell("fast = False\nprint(fast)", "False", "alone"),
        cell("print(fast)", "True", "alone"),
        cell("print(fast)", "True", "alone"),
    ]
    code, said = judged({"a": [0]}, cells, conftest=conftest, test_time=time)
    assert code == (0 if share else 1)
    assert ("busy: others took 50% of the machine; then Cell 1" in said) == bool(share)
    assert ("busy: others took 50% of the machine; then test_time" in said) == bool(share)


@pytest.mark.parametrize(
    ("error", "judgement"),
    [
        (AssertionError("2 < 1"), True),
        (md.RankError("rank 0 raised AssertionError: 2 < 1", 0), True),
        (md.RankError("rank 0 did not join all_reduce", 0), False),
        (NbCellError(1, "Cell execution caused an exception", ""), True),
        (NbCellError(1, "Timeout of 120 seconds exceeded", ""), False),
        (TimeoutError("late"), False),
    ],
)
def test_what_hangs_is_no_judgement(error, judgement):
    assert alone.is_judgement(error) == judgement
