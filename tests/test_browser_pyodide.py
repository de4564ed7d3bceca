"""Python in the browser answers as Python here: the lab's rooms, by Pyodide in node and by CPython.

`make browser` runs it, on what `make site` has built; it needs node. States of all rooms are drawn
at random, as their controls offer them.
"""

import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from chromium import SITE
from programs import SEED

from web.lab import answers

TESTS = Path(__file__).parent
MANY = 50  # of each room

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not shutil.which("node"), reason="no node"),
]


def difference(one: object, other: object, where: str) -> float:
    """How far apart the numbers of two answers are, at most, relatively. All else must be equal."""
    if isinstance(one, float) and isinstance(other, float):
        return 0 if one == other else abs(one - other) / max(abs(one), abs(other))
    if isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys(), where
        return max((difference(one[key], other[key], f"{where}.{key}") for key in one), default=0)
    if isinstance(one, list) and isinstance(other, list):
        assert len(one) == len(other), where
        pairs = enumerate(zip(one, other, strict=True))
        return max((difference(*pair, f"{where}[{i}]") for i, pair in pairs), default=0)
    assert type(one) is type(other) and one == other, where
    return 0


def test_pyodide_answers_as_the_installed_library() -> None:
    command = ["node", TESTS / "ask_pyodide.mjs", SITE / "lab", str(MANY), SEED]
    told = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert told.returncode == 0, told.stderr[-2000:]  # the source line that failed is a megabyte

    refused: Counter[str] = Counter()
    farthest = 0.0
    for room, asked, answer in json.loads(told.stdout):
        here = answers.answer(room, asked)
        apart = difference(json.loads(here), json.loads(answer), f"{room} {asked}: ")
        assert apart <= 1e-12, (room, asked)
        farthest = max(farthest, apart)
        refused[room] += "error" in json.loads(answer)
    print(f"{MANY} requests to each room, within {farthest:.1e}; refused: {dict(refused)}")
    assert refused.keys() == answers.ROOMS.keys()
    assert all(n < MANY for n in refused.values()) and sum(refused.values()) > 0
