"""A notebook cell, as a rank runs it. No IPython here: importing it would cost each rank 0.1 s."""

import ast
import builtins
import linecache
import os
import sys
from collections.abc import Callable
from typing import Any


def _refuse(*_: Any, **__: Any) -> Any:
    """What input(), breakpoint() and any pdb call."""
    raise RuntimeError(
        "a rank cannot ask you anything, unless its cell begins with `%%ranks --debug 1`: then "
        "input() works, and rank 1 stops at breakpoint() and at an error"
    )


def run_cell(
    source: str, name: str, ask: Callable[..., str] = _refuse, stop: Callable[..., Any] = _refuse
) -> None:
    """Run a cell in this rank's namespace, and show its last expression and its figures as Jupyter
    would. `ask` is its `input`, and `stop` its `breakpoint`."""
    let(ask, stop)
    _run(source, name)
    if figures := sys.modules.get("minidist.machine.runtime.figures"):
        figures.show()


def let(ask: Callable[..., str] = _refuse, stop: Callable[..., Any] = _refuse) -> None:
    """What `input` and `breakpoint` are in this rank from now on."""
    builtins.input = ask
    if "PYTHONBREAKPOINT" not in os.environ:  # with it the reader chooses another debugger
        sys.breakpointhook = stop


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
