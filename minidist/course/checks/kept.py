"""Accepted exercises, each kept as a file: the lesson your_trainer makes a trainer of them.

In a learner's copy (`my/`), the answer to an exercise of `PARTS` is written to `trainer/CHECK.py`
as soon as its check accepts it: the functions and classes of its cell, those of other cells that it
uses, and their imports. The first line has two digests. By these `read` finds a file that was
edited since, and one that an older check has accepted.
"""

import ast
import builtins
import contextlib
import hashlib
import importlib
import inspect
import linecache
import symtable
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from minidist.course.checks import solved

FOLDER, ANSWER = "trainer", "PART"  # a file's last line gives the answer this name
PARTS = {  # each check, and its lesson
    "halving_doubling": "communication",
    "overlaps": "distributed_data_parallel",
    "one_f_one_b": "layer_splitting",
    "attention": "feature_splitting",
    "norm": "mixed_parallelism",
    "my_zero": "zero",
    "unit": "fully_sharded",
    "selective": "activation_checkpointing",
    "agreed": "mixed_precision",
    "save": "surviving_failures",
}


def keep(check: str, answer: Any) -> None:
    """Write the answer down, if the check is one of `PARTS` and this is a learner's copy. What
    cannot be written down, such as a `partial`, is not kept: the check has answered anyway."""
    folder = solved.copy()
    if folder and check in PARTS:
        with contextlib.suppress(Exception):
            (folder / FOLDER).mkdir(exist_ok=True)
            body = f"{source_of(answer)}\n\n\n{ANSWER} = {answer.__name__}\n"
            written = f"# {digest(body)} {_of_check(check)}\n{body}"
            (folder / FOLDER / f"{check}.py").write_text(written, encoding="utf-8")


def read(folder: Path, check: str) -> str:
    """The source of the learner's part. Raises ValueError, with what is wrong with the file."""
    try:
        head, _, body = (folder / FOLDER / f"{check}.py").read_text("utf-8").partition("\n")
    except FileNotFoundError:
        raise ValueError("not solved yet") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot be read: {error}") from None
    if head.split()[1:2] != [digest(body)]:
        raise ValueError("edited since its check accepted it")
    if head.split()[2:] != [_of_check(check)]:
        raise ValueError("accepted by an older check")
    return body


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _of_check(check: str) -> str:
    return digest(Path(__file__).with_name(f"{PARTS[check]}.py").read_text(encoding="utf-8"))


def source_of(answer: Any) -> str:
    """The source of a function or class of a notebook, with all that it uses: a file to import."""
    imports: list[str] = []
    cells: dict[str, str] = {}  # in the order in which one needs the other
    _visit(answer, imports, cells)
    return "\n\n\n".join(["\n".join(dict.fromkeys(imports)), *filter(None, cells.values())])


def _visit(thing: Any, imports: list[str], cells: dict[str, str]) -> None:
    cell, scope = cell_of(thing), scope_of(thing)
    if cell in cells:
        return
    cells[cell] = ""
    text = definitions(cell)
    for name in sorted(_globals(symtable.symtable(text, "<cell>", "exec"))):
        if name not in scope or hasattr(builtins, name):
            continue
        value = scope[name]
        if isinstance(value, ModuleType):
            plain = value.__name__ == name
            imports.append(f"import {name}" if plain else f"import {value.__name__} as {name}")
        elif (module := getattr(value, "__module__", None)) == "__main__":
            _visit(value, imports, cells)
        elif module and getattr(importlib.import_module(module), name, None) is value:
            imports.append(f"from {module} import {name}")
        elif isinstance(value, int | float | str | tuple):
            imports.append(f"{name} = {value!r}")
    cells[cell] = cells.pop(cell) or text


def _globals(table: symtable.SymbolTable) -> Iterator[str]:
    """The names that code takes from outside of it."""
    for symbol in table.get_symbols():
        outer = table.get_type() == "module" and not symbol.is_assigned()
        if symbol.is_global() or outer:
            yield symbol.get_name()
    for child in table.get_children():
        yield from _globals(child)


def definitions(source: str) -> str:
    """Of a cell only what defines: its functions, its classes, its imports."""
    lines = [line for line in source.splitlines() if not line.startswith(("%", "!"))]
    kept = []
    for node in ast.parse("\n".join(lines)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
            first = min(
                [node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))]
            )
            text = "\n".join(lines[first - 1 : node.end_lineno])
            kept += [text] if "minidist.course.checks" not in text.partition("\n")[0] else []
    return "\n\n\n".join(kept)


def cell_of(thing: Any) -> str:
    """The source of the cell or file in which a function or a class is written, else ""."""
    code = getattr(_function(thing), "__code__", None)
    return "".join(linecache.getlines(code.co_filename)) if code else ""


def scope_of(thing: Any) -> dict[str, Any]:
    """The names of the notebook in which it is written."""
    return getattr(_function(thing), "__globals__", {})


def _function(thing: Any) -> Any:
    members = vars(thing).values() if inspect.isclass(thing) else [thing]
    found = (getattr(each, "__func__", each) for each in members)
    return next((each for each in found if inspect.isfunction(each)), None)
