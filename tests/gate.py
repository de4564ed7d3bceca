"""What `make test` runs: `python tests/gate.py [arguments of pytest]`.

First the tests side by side. Then, one by one, what is marked `alone`, and whole each notebook that
has such a cell. What failed may be the fault of a moment, so it runs again in a new process: twice
by itself, then with its whole file; a notebook always whole. If all three pass it is called flaky,
and what it said is shown at the end. A busy machine may spoil some runs: it gets three more. Else
the gate fails, and at once if tests of more than three files failed, if one hung, or if not all
could run.

Of pytest's arguments, paths come first. `-m` is not allowed, since the gate uses it.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

PYTEST = [sys.executable, str(Path(__file__).with_name("judge.py"))]
OPTIONS = ["--color=no", "-p", "no:cacheprovider", "-p", "needs", "--nbval", "--nbval-current-env"]
OPTIONS += ["--nbval-cell-timeout=120", "--nbval-sanitize-with=notebooks/sanitize.cfg"]
OPTIONS += ["--ignore=notebooks/ko"]  # the code of the English lessons: tests/test_korean.py

WORKERS = os.environ.get("WORKERS", "2")
SIDE_BY_SIDE = ["-n", WORKERS, "--dist=loadfile", "--max-worker-restart=0"]
SIDE_BY_SIDE += ["-m", "not soak and not browser and not alone"]
ONE_BY_ONE = ["-n0", "-m", "alone and not soak and not browser"]
AGAIN = ["-n0", "-m", "not soak and not browser"]

PASSED, FAILED, NOTHING = 0, 1, 5  # exit codes of pytest
HUNG = re.compile("from pytest-timeout|Timeout of .* seconds exceeded")  # nbval says the latter
FILES = 3  # of which tests may run again
SPARE = 3  # runs in place of those that could not be judged
SLOWEST = 40  # files of which it says how long they took
LIMIT = 55 * 60  # seconds for one run of pytest. Side by side takes 25 to 50 minutes on two cores.

PATHS = ["tests", "notebooks"]

Report = dict[str, Any]  # see judge.py


def run(*arguments: str) -> tuple[int, Report]:
    """pytest's exit code, and what became of each test. Raises if not all could run."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        environ = {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"}
        code = wait(subprocess.Popen([*PYTEST, str(report), *OPTIONS, *arguments], env=environ))
        if code not in (PASSED, FAILED, NOTHING) or not report.exists():
            raise RuntimeError(f"pytest ended with {code}: not all tests ran")
        found = json.loads(report.read_text())
    if left := found["left"]:
        some = ", ".join(left[:3]) + ", ..." * (len(left) > 3)
        raise RuntimeError(f"not all tests ran to their end: {some}")
    if bool(found["failed"]) != (code == FAILED):
        raise RuntimeError(f"pytest ended with {code}, and reports {len(found['failed'])} failures")
    return code, found


def wait(pytest: subprocess.Popen[bytes]) -> int:
    try:
        return pytest.wait(LIMIT)
    except subprocess.TimeoutExpired:
        pytest.kill()
        raise RuntimeError(f"pytest did not end within {LIMIT} s") from None
    except KeyboardInterrupt:
        pytest.wait()  # it has been interrupted too, and ends its workers
        raise RuntimeError("interrupted") from None


def why_wrong(file: str, tests: list[str], chosen: list[str], options: list[str]) -> str:
    """Run again tests of a file that have failed: "" if they pass, or what to call them. Of the
    file, `chosen` is all that was to run; all of it if nothing."""
    whole = [file] if file.endswith(".ipynb") else tests
    left, spoilt = [whole, whole, chosen or [file]], 0
    while left:
        what = left[0]
        print("\nIn a new process:", *what, flush=True)
        code, found = run(*what, *options, *AGAIN)
        if code == FAILED:
            return "Not flaky, but wrong"
        if not set(tests) <= {*found["passed"], *found["busy"]}:
            return "Failed, and did not run again"
        if set(tests) <= set(found["passed"]):
            left.pop(0)
        elif (spoilt := spoilt + 1) > SPARE:
            return "Failed, and could not be judged again, since the machine was busy"
    return ""


def judge(arguments: list[str]) -> int:
    paths = list(takewhile(lambda each: not each.startswith("-"), arguments))
    options = arguments[len(paths) :]
    if any(re.match(r"-\w*m", each) for each in options):
        raise RuntimeError("-m is not for you to choose: the gate uses it")
    codes, busy = [], []
    failed: dict[str, str] = {}
    for how in (SIDE_BY_SIDE, ONE_BY_ONE):
        code, found = run(*(paths or PATHS), *options, *how)
        slowest = sorted(found["seconds"].items(), key=lambda each: -each[1])[:SLOWEST]
        print("Seconds by file:", *(f"{file} {taken:.0f}" for file, taken in slowest), flush=True)
        codes.append(code)
        busy += found["busy"]
        failed |= found["failed"]
        files = {test.split("::")[0] for test in failed}
        if len(files) > FILES:
            print(f"\nTests of {len(files)} files failed: none runs again.")
            return FAILED
        if hung := [test for test, why in failed.items() if HUNG.search(why)]:
            print(f"\nA hang is no fault of a moment, and does not run again: {hung[0]}")
            return FAILED
    for file in sorted(files):
        tests = [test for test in failed if test.split("::")[0] == file]
        chosen = [path for path in paths if path.split("::")[0] == file]
        if wrong := why_wrong(file, tests, chosen, options):
            print(f"\n{wrong}: {file}")
            return FAILED
    if busy:
        print(f"\nNot judged, since the machine was busy: {len(busy)} tests that measure time.")
    for test, why in failed.items():
        print(f"\nflaky: {test}\n{why}\nAfterwards it passed three times; see above.")
    if set(codes) == {NOTHING} or (NOTHING in codes and not arguments):
        print("\nNothing was tested.")
        return NOTHING
    return PASSED


def main(arguments: list[str]) -> int:
    start = time.monotonic()
    try:
        code = judge(arguments)
    except RuntimeError as error:
        print(f"\n{error}")
        code = FAILED
    print(f"\n{'green' if code == PASSED else 'RED'} after {time.monotonic() - start:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
