"""The picture compare: one training by all of minidist and of torch. What it shows was measured:
python -m minidist compare --peers --json img/compare.json, on a quiet machine."""

import json
from pathlib import Path

from style import save

from minidist.instruments.compare.results import draw, rows_of

FIGURES = Path(__file__).with_suffix(".json")


def compare() -> None:
    """As `python -m minidist compare` draws it."""
    save(draw(rows_of(json.loads(FIGURES.read_text())["rows"])), "compare")


if __name__ == "__main__":
    compare()
