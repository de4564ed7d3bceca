"""What is marked `alone` runs alone, whatever the other worker does."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import turns

# Twelve tests, of which every second pair is alone; each writes down when it ran.
TESTS = """
import json, time
import pytest

ALONE = pytest.mark.alone

@pytest.mark.parametrize("n", [pytest.param(n, marks=[ALONE] * (n % 4 < 2)) for n in range(12)])
def test(n, request):
    begin = time.monotonic()
    time.sleep(0.05)
    print(json.dumps([n % 4 < 2, begin, time.monotonic()]), file=open(f"FILE{n}.json", "w"))
"""


def test_beside_a_test_that_is_alone_no_other_runs(tmp_path: Path) -> None:
    shutil.copy(turns.__file__, tmp_path / "turns.py")
    (tmp_path / "conftest.py").write_text("from turns import pytest_runtest_protocol")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone")
    for file in "ab":
        (tmp_path / f"test_{file}.py").write_text(TESTS.replace("FILE", file))
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    ran = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert "24 passed" in ran.stdout, ran.stdout + ran.stderr

    spans = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    for file, n in itertools.product("ab", (0, 4, 8)):  # a pair that is alone runs in one go
        spans[f"{file}{n}"][2] = spans.pop(f"{file}{n + 1}")[2]
    together = [
        one_alone or other_alone
        for (one_alone, *one), (other_alone, *other) in itertools.combinations(spans.values(), 2)
        if one[0] < other[1] and other[0] < one[1]
    ]
    assert len(spans) == 18 and True not in together
    assert False in together  # the others do run side by side
