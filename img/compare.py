"""The picture compare: one training by all of minidist and of torch. What it shows was measured:
python -m minidist compare --json img/compare.json, on a quiet machine."""

import json
from pathlib import Path

from style import save

from minidist.instruments.compare.results import Row, draw

FIGURES = Path(__file__).with_suffix(".json")


def compare() -> None:
    """As `python -m minidist compare` draws it."""
    rows = json.loads(FIGURES.read_text())["rows"]
    save(draw([Row(**row) for row in rows]), "compare")


if __name__ == "__main__":
    compare()
