"""A notebook cell, as a rank runs it. No IPython here: importing it would cost each rank 0.1 s."""

import ast
import linecache
import sys

pictures: list[bytes] | None = None  # what the cell that runs now has drawn, as PNG


def run_cell(source: str, name: str) -> list[bytes]:
    """Run a cell in this rank's namespace, and show its last expression as Jupyter would.

    Returns what it has drawn.
    """
    global pictures
    pictures = []
    try:
        _run(source, name)
        if figures := sys.modules.get("minidist.runtime.figures"):
            figures.show()
        return pictures
    finally:
        pictures = None


def _run(source: str, name: str) -> None:
    import __main__

    remember(source, name)
    tree = ast.parse(source, name)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        last = tree.body.pop()
    exec(compile(tree, name, "exec"), vars(__main__))
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), name, "eval"), vars(__main__))
        if value is not None:
            print(repr(value))


def remember(source: str, name: str) -> None:
    """Let tracebacks find the cell's lines."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
