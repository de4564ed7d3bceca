"""How many minutes a lesson takes, estimated from what it holds.

    python notebooks/minutes.py        (all lessons, and their sum)

The start page and the map of the lessons say these minutes, to five, and the README their sum
(tests/test_links.py). Nobody has been timed. Careful readers guessed the minutes of twenty lessons
of November 2026; the rates below meet fifteen of these guesses within a fifth. Of four long lessons
they say too little, of one too much.
"""

import json
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent

WORDS = 120  # a minute: technical prose, read once, with its formulas and pictures
LINES = 8  # of code a minute, with what they print
PUZZLE, EXERCISE = 3, 30  # minutes each: a pipeline's schedule by hand takes a newcomer 35


def minutes(path: Path) -> float:
    """Minutes for a notebook: its words, its lines of code, its puzzles and exercises. The cell of
    an exercise has the comment "Your lines"."""
    cells = json.loads(path.read_text())["cells"]
    text = {"markdown": "", "code": ""}
    for cell in cells:
        text[cell["cell_type"]] += "".join(cell["source"]) + "\n"
    lines = [line for line in text["code"].splitlines() if line.strip()]
    checks = len(re.findall(r"\bcheck\.\w+\(", text["code"]))
    exercises = text["code"].count("Your lines")
    tasks = PUZZLE * (checks - exercises) + EXERCISE * exercises
    return len(text["markdown"].split()) / WORDS + len(lines) / LINES + tasks


def rounded(path: Path) -> int:
    """The minutes of a lesson as they are told: to five."""
    return 5 * round(minutes(path) / 5)


def lessons() -> list[Path]:
    return [path for path in sorted(HERE.glob("*.ipynb")) if path.stem != "00_start"]


if __name__ == "__main__":
    for path in lessons():
        print(f"{path.stem:32} {minutes(path):5.1f}  {rounded(path):3}")
    print(f"{sum(map(rounded, lessons())) / 60:.1f} hours")
