"""How `make test` judges: what is alone, what runs again, and what is only busy."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import gate
import judge
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output
from programs import LISTEN_TO_SIGINT, eventually

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


# One run of pytest, as the gate judges it.
ONE_RUN = [*gate.PYTEST[1:], "report.json", *gate.OPTIONS, "tests", "notebooks"]
WITH_LIMIT = "import sys, gate; gate.LIMIT = {}; sys.exit(gate.main(sys.argv[1:]))"


def environ(workers):
    """Of this process, without what pytest and xdist tell their own tests."""
    theirs = ("PYTEST_XDIST", "PYTEST_CURRENT", "PYTEST_VERSION")
    ours = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    return ours | {"WORKERS": workers, "PYTHONPATH": str(Path(__file__).parent)}


@pytest.fixture
def judged(tmp_path):
    """Run the gate over files of tests, {name: how often each test fails}, and notebooks. A worker
    takes a second to start: a test asks for one if it matters to it."""
    here = Path(__file__).parent
    for folder in ("tests", "notebooks"):
        (tmp_path / folder).mkdir()
    shutil.copy(here.parent / "notebooks" / "sanitize.cfg", tmp_path / "notebooks")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -ra\nmarkers =\n  alone\n  soak\n")

    def judged(files, cells=(), workers="0", arguments=(), limit=300, program=None, **sources):
        for name, source in sources.items():
            (tmp_path / "tests" / f"{name}.py").write_text(source)
        for name, fails in files.items():
            (tmp_path / "tests" / f"test_{name}.py").write_text(TEST.replace("FAILS", str(fails)))
        if cells:
            nbformat.write(new_notebook(cells=list(cells)), tmp_path / "notebooks" / "a.ipynb")
        ran = subprocess.run(
            [sys.executable, *(program or ["-c", WITH_LIMIT.format(limit)]), *arguments],
            cwd=tmp_path,
            env=environ(workers),
            capture_output=True,
            text=True,
        )
        return ran.returncode, ran.stdout + ran.stderr

    judged.folder = tmp_path
    judged.runs = lambda name, fails: len(
        (tmp_path / "tests" / f"test_{name}.py.{fails}.runs").read_text().split()
    )
    return judged


def test_what_fails_once_is_flaky_and_said_with_its_failure(judged):
    code, said = judged({"a": [0, 1], "b": [1]}, workers="1")
    assert code == 0
    assert judged.runs("a", 1) == judged.runs("b", 1) == 4  # once red, three times green
    assert judged.runs("a", 0) == 2  # once with its whole file
    for name in "ab":
        assert f"flaky: tests/test_{name}.py::test[1]\n" in said
    assert said.count("AssertionError: not yet") >= 4 and "test[0]\n" not in said
    assert said.count("Seconds by file: tests/test_") == 2  # side by side, and one by one


def test_what_fails_again_has_failed(judged):
    code, said = judged({"a": [0, 2]})
    assert code == 1 and "Not flaky, but wrong: tests/test_a.py" in said
    assert judged.runs("a", 2) == 2


def test_what_fails_only_among_others_has_failed(judged):
    """Alone it passes: another test has spoiled something for it."""
    source = "import os\ndef test_a(): os.spoiled = True\n"
    source += "def test_b(): assert not hasattr(os, 'spoiled')\n"
    code, said = judged({"b": [0]}, test_a=source)
    assert code == 1 and "Not flaky, but wrong: tests/test_a.py" in said


def test_what_is_skipped_the_second_time_has_failed(judged):
    source = "import os, pytest\ndef test_a():\n  if os.path.exists('ran'): pytest.skip('now')\n"
    source += "  open('ran', 'w').close()\n  assert False\n"
    assert judged({"b": [0]}, test_a=source)[0] == 1


def test_where_four_files_fail_none_runs_again(judged):
    code, said = judged(dict.fromkeys("abcd", [1]))
    assert code == 1 and "none runs again" in said
    assert judged.runs("a", 1) == 1


def test_what_hangs_does_not_run_again(judged):
    source = "import os, time, pytest\n@pytest.mark.timeout(1)\ndef test():\n"
    source += "  if not os.path.exists('ran'): open('ran', 'w').close(); time.sleep(9)\n"
    code, said = judged({}, test_b=source, workers="1")
    assert code == 1 and "A hang is no fault of a moment" in said and "In a new process" not in said


def test_tests_that_cannot_be_collected_fail(judged):
    code, said = judged({"a": "nonsense"})
    assert code == 1 and "RED" in said


def test_tests_that_cannot_be_collected_fail_beside_one_that_is_flaky(judged):
    code, said = judged({"a": "nonsense", "b": [1]}, workers="1")
    assert code == 1 and "not all tests ran to their end: tests/test_a.py\n" in said


# Only in a worker of xdist, by its name. The gate's second run of pytest has none, and would pass.
DIES = (
    "import os, time\nif os.environ.get('PYTEST_XDIST_WORKER') == {!r}: time.sleep({}); os._exit(3)"
)


@pytest.mark.parametrize(
    ("source", "workers"),
    [
        (DIES.format("gw0", 0) + "\ndef test(): pass", "1"),
        ("def test():\n" + indent(DIES.format("gw0", 0), "  "), "1"),
        (DIES.format("gw1", 3) + "\ndef test(): pass", "2"),  # the other has nothing left to do
    ],
    ids=["as it collects", "as it runs", "late"],
)
def test_a_worker_that_dies_fails(judged, source, workers):
    code, said = judged({"a": [0]}, test_b=source, workers=workers)
    assert code == 1 and "a worker died" in said and "In a new process" not in said


@pytest.mark.parametrize(
    ("source", "said"),
    [
        # What cannot be sent to pytest's first process ends xdist, with the other tests undone.
        ("def test(): assert 1 == 2, 'name \\udc80'", "not all tests ran"),
        ("import os, pytest\n@pytest.mark.alone\ndef test(): os._exit(0)", "not all tests ran"),
        ("import time\ndef test(): time.sleep(60)", "pytest did not end within 5 s"),
    ],
    ids=["no report", "no end", "too long"],
)
def test_where_not_all_ran_it_fails(judged, source, said):
    limit = 5 if "5 s" in said else 300
    code, all_said = judged({"a": [0]}, test_b=source, limit=limit, workers="1")
    assert code == 1 and said in all_said, all_said


def test_an_interrupt_ends_it_in_order(judged, tmp_path):
    (tmp_path / "tests" / "test_a.py").write_text(
        "import time\ndef test():\n  open('ran', 'w').close()\n  time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", LISTEN_TO_SIGINT + WITH_LIMIT.format(300)],
        cwd=tmp_path,
        env=environ("1"),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        assert eventually((tmp_path / "ran").exists, 60)
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        said, _ = running.communicate(timeout=60)
    assert running.returncode == 1 and "\ninterrupted\n" in said and "RED" in said
    with pytest.raises(ProcessLookupError):  # nobody is left
        os.killpg(running.pid, 0)


@pytest.mark.parametrize("option", ["--collect-only", "--setup-only"])
def test_what_does_not_run_fails(judged, option):
    code, said = judged({"a": [0]}, arguments=[option], workers="1")
    assert code == 1 and "not all tests ran to their end" in said


def test_tests_of_the_same_name_fail(judged):
    """Side by side only the first would run."""
    source = "import pytest\n"
    for name, ids in (("b", ["y-z", "z"]), ("a", ["x", "x-y"])):
        source += f"@pytest.mark.parametrize({name!r}, [0, 1], ids={ids})\n"
    source += "def test(a, b): assert (a, b) != (1, 1)\n"
    code, said = judged({"a": [0]}, test_b=source, workers="1")
    assert code == 1 and "tests/test_b.py::test[x-y-z] (2 have this name)" in said


def test_what_fails_after_the_last_test_fails(judged):
    late = "def pytest_runtest_logfinish(nodeid): assert 'XDIST' not in str(os.environ.keys())\n"
    code, said = judged({"a": [0]}, conftest="import os\n" + late, workers="1")
    assert code == 1 and "what had an internal error" in said


def test_where_there_are_no_tests_it_fails(judged):
    code, said = judged({})
    assert code == 5 and "Nothing was tested" in said


def test_a_failure_after_a_test_has_passed_counts(judged):
    source = "import pytest\n@pytest.fixture\ndef left():\n  yield\n  assert False, 'left'\n"
    code, said = judged({"a": [0]}, test_b=source + "def test(left): pass\n")
    assert code == 1 and "Not flaky, but wrong: tests/test_b.py" in said


def test_arguments_choose_tests_and_hold_for_repeats(judged, monkeypatch):
    verbose = "def test(pytestconfig): assert pytestconfig.getoption('-v') == 1, 'quiet'\n"
    arguments = ["tests/test_a.py::test[1]", "tests/test_b.py", "-v"]
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k nothing")
    files = {"a": [1, 8], "c": [9]}
    code, said = judged(files, arguments=arguments, test_b=verbose, workers="1")
    assert code == 0 and "flaky: tests/test_a.py::test[1]\n" in said
    assert not list((judged.folder / "tests").glob("*.[89].runs"))
    code, said = judged({"a": [0]}, arguments=["-vm", "alone"])
    assert code == 1 and "the gate uses it" in said


def cell(source, printed, *tags):
    outputs = [new_output("stream", name="stdout", text=f"{printed}\n")] if printed else []
    return new_code_cell(source, outputs=outputs, execution_count=1, metadata={"tags": list(tags)})


def test_a_notebook_runs_again_whole(judged):
    count = "file = open('runs', 'a+')\nn = file.write('x') and file.tell()"
    cells = [cell(count, ""), cell("print('ok' if n > 1 else 'no')", "ok")]
    code, said = judged({"a": [0]}, cells, workers="1")
    assert code == 0 and "flaky: notebooks/a.ipynb::Cell 1\n" in said


def test_what_is_measured_on_a_busy_machine_is_not_judged(judged):
    conftest = "from judge import quiet\nquiet.Moment.share = lambda moment: 0.5\n"
    time = "import pytest\n@pytest.mark.alone\ndef test_time(): assert 2 < 1\n"
    cells = [
        cell("print(2 < 1)\nassert 2 < 1; fast = 1", "False", "alone"),
        cell("print(fast)", "1"),
    ]
    code, said = judged({"a": [0]}, cells, conftest=conftest, test_time=time)
    assert code == 0 and "the machine was busy: 3 tests" in said
    for name in ("Cell 0", "test_time"):
        assert f"busy: others took 50% of the machine; then {name}" in said
    assert "busy: a cell before it was not judged; then Cell 1" in said


def test_a_cell_may_assert_what_was_measured_when_the_machine_was_busy(judged):
    """What others took in each cell that measures; only the cells whose names it uses count."""
    cells = {
        "assert 2 < 1; early = 1": 0.0,  # before others took anything
        "a = 1": 0.5,
        "b = 1": 0.0,
        "assert b < 1": 0.0,  # measured on a quiet machine
        "assert a < 1": 0.0,  # busy
        "assert f() < 1": 0.0,  # busy, by way of a cell that measures nothing
        "a = 1; assert a < 1": 0.0,  # measured anew
        "c = 1; assert c < 1": 0.5,  # busy
        "assert c < 1": 0.0,  # busy: that cell had made the name
    }
    conftest = (
        "from judge import quiet\n"
        f"shares = {list(cells.values())}\n"
        "quiet.Moment.share = lambda moment: shares.pop(0)\n"
        "quiet.Moment.lasted = lambda moment: 1.0\n"
    )
    cells = [cell(source, "", "alone") for source in cells]
    cells.insert(5, cell("c = a\ndef f(): return c", ""))
    code, said = judged({}, cells, program=ONE_RUN, conftest=conftest)
    assert code == 1 and "3 failed, 3 passed, 4 skipped" in said, said
    for busy in (4, 6, 8, 9):
        assert f"others took 50% of the machine; then Cell {busy}" in said


@pytest.mark.parametrize(
    ("source", "read", "made"),
    [
        ("import a\nb = a.c", "a", "b"),  # an import measures nothing
        ("for a in b: print(a)", "b print", "a"),
        ("a = a + 1; b |= c", "a b c", "a b"),
        ("a = [b for b in a]", "a", "a"),
        ("def f(a):\n  b = a\n  return b + c", "c", "f"),
        ("a[b][0] = c", "a b c", "a b"),
        ("%%ranks --timeout 2\na = b", "b", "a"),
        ('a = r.get("b")', "r b", "a"),
        ("a.append(b)", "a b", "a"),
        ("def f():\n  a = {}\n  a[0] = b", "b", "f"),  # an `a` of its own
    ],
)
def test_names_of_a_cell(source, read, made):
    assert judge.names_of(source) == (set(read.split()), set(made.split()))


@pytest.mark.parametrize("busy_runs, code", [(2, 0), (9, 1)])
def test_what_runs_again_on_a_busy_machine_gets_more_runs(judged, busy_runs, code):
    conftest = (
        "import os\nfrom judge import quiet\n"
        "quiet.Moment.share = lambda moment: 0.5 if os.path.getsize('runs') > 1 else 0.0\n"
    )
    count = "with open('runs', 'a') as file:\n        n = file.write('x') and file.tell()"
    time = f"import pytest\n@pytest.mark.alone\ndef test_time():\n    {count}\n"
    time += f"    assert n > {1 + busy_runs}\n"
    found, said = judged({"a": [0]}, conftest=conftest, test_time=time)
    assert found == code, said
    assert ("flaky: tests/test_time.py::test_time\n" in said) == (code == 0)
    assert ("could not be judged again" in said) == (code == 1)


def test_on_a_busy_machine_all_but_wrong_numbers_are_judged(judged):
    conftest = "from judge import quiet\nquiet.Moment.share = lambda moment: 0.5\n"
    time = "import pytest\n@pytest.mark.alone(always_judged=True)\ndef test_time(): assert 2 < 1\n"
    cells = [
        cell("print(1)", "2"),  # not timed
        cell("1 / 0", "", "alone"),  # not a number
        cell("# slow\nassert 2 < 1; fast = 1", "", "alone"),  # busy
        cell("slow", ""),  # not a name of that cell
        cell("assert fast", ""),  # busy too
        cell("assert 2 < 1", ""),  # not timed
    ]
    code, said = judged({}, cells, program=ONE_RUN, conftest=conftest, test_time=time)
    assert code == 1 and "5 failed, 2 skipped" in said, said
    for name in ("Cell 2", "Cell 4"):
        assert f"then {name}" in said


def test_a_cell_that_takes_too_long_fails_though_it_goes_on(judged, monkeypatch):
    conftest = "from judge import quiet\nquiet.Moment.share = lambda moment: 0.5\n"
    quick = ["--nbval-cell-timeout=2"]
    for cells in (
        [cell("!sleep 9; echo ok", "ok", "alone"), cell("print(1)", "2")],
        [cell("print(1)", "1", "alone"), cell("!sleep 9", "")],
    ):
        code, said = judged({}, cells, program=ONE_RUN, conftest=conftest, arguments=quick)
        assert code == 1 and "1 failed" in said, said


def test_to_judge_needs_nothing_that_is_slow_to_import(judged):
    """Else each run of pytest, and each worker, takes seconds more."""
    source = "import sys, nbformat, pytest\n@pytest.mark.alone\ndef test():\n"
    source += "    assert not sys.modules.get('torch') and not sys.modules.get('rfc3987_syntax')\n"
    code, said = judged({}, program=ONE_RUN, test_a=source)
    assert code == 0 and "1 passed" in said, said


def test_what_is_measured_on_a_quiet_machine_is_judged(judged):
    conftest = "from judge import quiet\nquiet.Moment.share = lambda moment: 0.0\n"
    time = "import pytest\n@pytest.mark.alone\ndef test_time(): assert 2 < 1\n"
    code, said = judged({"a": [0]}, conftest=conftest, test_time=time)
    assert code == 1 and "Not flaky, but wrong: tests/test_time.py" in said


@pytest.mark.parametrize(
    ("kind", "said", "wrong"),
    [
        ("AssertionError", "2 < 1", True),
        ("RankError", "rank 0 raised AssertionError: 2 < 1", True),
        ("RankError", "every rank raised AssertionError: 2 < 1", True),
        ("RankError", "rank 0 did not join all_reduce\n  rank 1 raised AssertionError too", False),
        ("NbCellError", "Cell outputs differ", True),
        ("NbCellError", "Timeout of 120 seconds exceeded", False),
        ("KeyboardInterrupt", "", False),
        ("ImportError", "AssertionError", False),
    ],
)
def test_only_a_wrong_number_is_excused(kind, said, wrong):
    assert judge.is_wrong_number(kind, said) == wrong


def test_an_error_in_a_cell_is_the_notebooks(judged):
    """Its traceback holds lines of the source, which may name other errors."""
    conftest = "from judge import quiet\nquiet.Moment.share = lambda moment: 0.5\n"
    on_a_rank = "import minidist as md\ndef f():\n    {}\nmd.launch(f, world_size={})"
    cells = [
        cell(on_a_rank.format("assert 2 < 1", 1), "", "alone"),
        cell(on_a_rank.format("assert 2 < 1", 2), "", "alone"),
        cell(on_a_rank.format("raise KeyError('AssertionError')", 1), "", "alone"),
        cell("raise ValueError('a')  # AssertionError: b", "", "alone"),
    ]
    code, said = judged({}, cells, program=ONE_RUN, conftest=conftest)
    assert code == 1 and "2 failed, 2 skipped" in said, said
    for excused in ("Cell 0: RankError: rank 0", "Cell 1: RankError: every rank"):
        assert f"then {excused} raised AssertionError" in said
