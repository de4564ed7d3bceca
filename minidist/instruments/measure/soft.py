"""Measured times that may miss: MINIDIST_TIMING=soft, for a machine that others use.

A lesson asserts what it measured, and on a machine that others use a time may miss. With the
variable, `%load_ext minidist` softens such assertions: one that misses prints a sentence (but not
under nbval), and the cell goes on. And a loop over `rounds` takes as few as it may. An assertion is
about a time if it stands in a cell that is tagged `alone`, in a notebook of this folder, and
compares by more and less, or only asks a name or a function. One of them that is not ends in
`# not timed`. Every other assertion fails as ever.
"""

import ast
import json
import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

NOT_TIMED = "# not timed"


def rounds(least: int = 1, most: float = math.inf, seconds: float = math.inf) -> Iterator[int]:
    """Numbers of rounds, 0, 1, ..., for a loop that breaks as soon as its times are good.

    On a busy machine it takes more rounds: `most`, or until the seconds have passed. With
    MINIDIST_TIMING=soft times may miss, and it takes the `least`.
    Lesson: layer_splitting.
    """
    soft, end = os.environ.get("MINIDIST_TIMING") == "soft", time.monotonic() + seconds
    number = 0
    while number < least or (not soft and number < most and time.monotonic() < end):
        yield number
        number += 1


class Soften(ast.NodeTransformer):
    """Turns `assert test` into `assert test or missed("test")`."""

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        module, text = f"__import__({__name__!r}, fromlist=['missed'])", ast.unparse(node.test)
        asks = ast.parse(f"{module}.missed({text!r})", mode="eval").body
        for part in ast.walk(asks):
            ast.copy_location(part, node)
        node.test = ast.copy_location(ast.BoolOp(ast.Or(), [node.test, asks]), node.test)
        return node


def missed(test: str) -> bool:
    """Says that a timed assertion missed, and lets it pass; False if it is about something else."""
    soft = any(
        test == ast.unparse(found.test)
        for path in Path.cwd().glob("*.ipynb")
        for found in timed(path)
    )
    if soft and "PYTEST_CURRENT_TEST" not in os.environ:  # nbval compares what a cell prints
        print(f"missed on this machine (MINIDIST_TIMING=soft): {test}")
    return soft


def timed(path: Path) -> Iterator[ast.Assert]:
    """The assertions of a notebook that are about a measured time."""
    try:
        cells = json.loads(path.read_text())["cells"]
    except (OSError, ValueError, KeyError):  # another's file, or half of one
        return
    for cell in cells:
        if "alone" in cell["metadata"].get("tags", []):
            for found, about_time in assertions("".join(cell["source"])):
                if about_time:
                    yield found


def assertions(cell: str) -> Iterator[tuple[ast.Assert, bool]]:
    """The assertions of a cell's text; and of each whether it is about a time, if the cell is."""
    lines = [re.sub(r"^(\s*)(\w+ = )?[%!].*", r"\1pass", line) for line in cell.split("\n")]
    try:
        tree = ast.parse("\n".join(lines))
    except SyntaxError:  # a cell that a learner has begun
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            last = lines[(node.end_lineno or node.lineno) - 1]
            yield node, not last.endswith(NOT_TIMED) and _may_be_timed(node.test)


def _may_be_timed(test: ast.expr) -> bool:
    parts = list(ast.walk(test))
    signs = [sign for part in parts if isinstance(part, ast.Compare) for sign in part.ops]
    if signs:
        return any(isinstance(sign, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for sign in signs)
    return not any(isinstance(part, ast.Attribute) and part.attr == "equal" for part in parts)
