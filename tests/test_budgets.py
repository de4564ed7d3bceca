"""The library is meant to be read in full, its tests to be waited for: each part has a budget."""

import ast
import io
import tokenize
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLOORS = {"course", "instruments", "machine"}
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def lines_of_code(source: str) -> int:
    """Lines of a module without blank ones, comments and docstrings."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            text = node.body[0]
            assert text.end_lineno is not None
            code -= {*range(text.lineno, text.end_lineno + 1)}
    return len(code)


def measured() -> dict[str, int]:
    """Of each room, by its name, and of the tests."""
    found: dict[str, int] = {}
    for path in sorted([*ROOT.glob("minidist/**/*.py"), *ROOT.glob("tests/**/*.py")]):
        top, *within = path.relative_to(ROOT).parts
        place = [Path(part).stem for part in within if part not in FLOORS]
        room = place[0] if top == "minidist" else "tests"
        found[room] = found.get(room, 0) + lines_of_code(path.read_text())
    return found


def test_no_part_is_over_its_budget() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    budgets, there = project["tool"]["minidist"]["budgets"], measured()
    assert budgets.keys() == there.keys(), "each room has one line in [tool.minidist.budgets]"
    over = {room: f"{n} > {budgets[room]}" for room, n in there.items() if n > budgets[room]}
    assert not over, f"delete first: lines of code > budget: {over}"
