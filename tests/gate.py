"""What `make test` runs: `python tests/gate.py [arguments of pytest]`.

First the tests side by side. Then, one by one, what is marked `alone`, and whole each notebook that
has such a cell. What failed may be the fault of a moment, so it runs again by itself, in a new
process, a notebook whole. If it passes three times in a row it is called flaky, and what it said is
shown at the end; else, or if tests of more than three files failed, all has failed.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

HERE = str(Path(__file__).parent)
PLUGINS = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")]))
PYTEST = [sys.executable, "-m", "pytest", "--color=no", "-p", "no:cacheprovider", "-p", "alone"]
PYTEST += ["--nbval", "--nbval-current-env", "--nbval-cell-timeout=120"]
PYTEST += ["--nbval-sanitize-with=notebooks/sanitize.cfg", "-o", "junit_family=xunit1"]

WORKERS = os.environ.get("WORKERS", "2")
SIDE_BY_SIDE = ["-n", WORKERS, "--dist=loadfile", "--max-worker-restart=0"]
SIDE_BY_SIDE += ["-m", "not soak and not alone"]
ONE_BY_ONE = ["-n", "0", "-m", "alone and not soak"]

ENDED, FAILED, NOTHING = 0, 1, 5  # exit codes of pytest
FILES, TIMES = 3, 3


@dataclass(frozen=True)
class Failure:
    test: str  # a node id; of a notebook its path
    said: str

    @property
    def file(self) -> str:
        return self.test.split("::")[0]


def run(*arguments: str) -> tuple[int, list[Failure]]:
    """pytest's exit code, and what failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [*PYTEST, f"--junitxml={report}", *arguments]
        code = subprocess.run(command, env=os.environ | {"PYTHONPATH": PLUGINS}).returncode
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
        failures = [
            Failure(node_id(case), f"{wrong.get('message')}\n{wrong.text}")
            for case in cases
            for wrong in (*case.findall("failure"), *case.findall("error"))
        ]
    return code, failures


def node_id(case: ElementTree.Element) -> str:
    file, name = case.get("file", ""), case.get("name", "")
    return file if file.endswith(".ipynb") else f"{file}::{name}"


def passes_again(test: str) -> bool:
    print(f"\n{test} failed. Alone, in a new process:", flush=True)
    return all(run("-n", "0", "-m", "not soak", test)[0] == ENDED for _ in range(TIMES))


def main(arguments: list[str]) -> int:
    start, codes, failures = time.monotonic(), [], []
    expected = (ENDED, FAILED, NOTHING) if arguments else (ENDED, FAILED)
    for how in (SIDE_BY_SIDE, ONE_BY_ONE):
        code, failed = run("tests", "notebooks", "--durations=10", *how, *arguments)
        died = any("crashed while running" in failure.said for failure in failed)
        if code not in expected or died or (code == FAILED and not failed):
            return FAILED  # a worker died, or tests could not be collected: not all have run
        codes.append(code)
        failures += failed
        if len({failure.file for failure in failures}) > FILES:
            print(f"\nTests of more than {FILES} files failed: none runs again.")
            return FAILED
    said: dict[str, str] = {}
    for failure in failures:
        said[failure.test] = said.get(failure.test, "") + failure.said
    for test, text in said.items():
        if not passes_again(test):
            print(f"\nfailed again: {test}")
            return FAILED
        said[test] = f"flaky: {test}\n{text}\nThen it passed {TIMES} times, each in a new process."
    print("", *said.values(), f"all in {time.monotonic() - start:.0f} s", sep="\n")
    return NOTHING if set(codes) == {NOTHING} else ENDED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
