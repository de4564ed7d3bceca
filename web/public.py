"""What is public in the library, read from its sources without importing them.

Public is what a module names in `__all__`, or else what it defines. A name may come from another
file of the library, also by an import for type checkers only: so names that are imported on first
use are found like all others.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

FLOORS = "course", "instruments", "machine"  # folders of rooms, which users need not know
Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = Any  # of ast; which kind it is says what it has


def place(module: str) -> str:
    """A module without its floor: planner.device of minidist.instruments.planner.device."""
    parts = module.split(".")[1:]
    return ".".join(parts[1:] if parts and parts[0] in FLOORS else parts)


@dataclass(frozen=True)
class Name:
    """Something that the library defines: in which module, by which name, and the definition. A
    module has no name in itself."""

    module: str
    name: str
    node: Node = field(default=None, compare=False)

    @property
    def doc(self) -> str:
        documented = isinstance(self.node, ast.Module | ast.ClassDef | Function)
        return ast.get_docstring(self.node) or "" if documented else ""


class Sources:
    """The library's modules, parsed."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def file(self, module: str) -> Path:
        path = self.root / module.replace(".", "/")
        for file in path / "__init__.py", path.with_suffix(".py"):
            if file.exists():
                return file
        raise LookupError(f"{module} is no module")

    @cache  # noqa: B019 (one for a whole run)
    def tree(self, module: str) -> ast.Module:
        return ast.parse(self.file(module).read_text())

    @cache  # noqa: B019
    def scope(self, module: str) -> dict[str, Node]:
        """What defines each name of a module, or imports it from another one of the library."""
        found: dict[str, Node] = {}
        for node in statements(self.tree(module).body):
            if name := defined(node):
                found.setdefault(name, node)
            elif isinstance(node, ast.ImportFrom) and "minidist" in (node.module or ""):
                for alias in node.names:
                    found.setdefault(alias.asname or alias.name, node)
        return found

    def public(self, module: str) -> dict[str, Name]:
        """The public names of a module, and where they are defined."""
        own = self.scope(module)
        if "__all__" in own:
            names = ast.literal_eval(own["__all__"].value)
        else:
            names = [name for name in own if not name.startswith("_") and defined(own[name])]
        return {name: self.find(module, name) for name in names}

    def find(self, module: str, name: str) -> Name:
        """Where `name`, as `module` knows it, is defined."""
        node = self.scope(module).get(name)
        if node and defined(node):
            return Name(module, name, node)
        if node:
            (name,) = (each.name for each in node.names if name == (each.asname or each.name))
            if node.module != module:
                return self.find(node.module, name)
        inner = f"{module}.{name}"  # a package's own file
        return Name(inner, "", self.tree(inner))

    def bases(self, name: Name) -> Iterator[Name]:
        """Those classes that a class is derived from which the library defines itself."""
        for base in name.node.bases:
            try:
                yield self.find(name.module, ast.unparse(base))
            except LookupError:  # torch's, for instance
                continue

    def signature(self, name: Name) -> str:
        """What makes one of a class: "(x: int, y: float = 0)"."""
        fields = list(self.fields(name))
        if is_dataclass(name.node):
            return f"({', '.join(fields)})"
        for node in name.node.body:
            if isinstance(node, Function) and node.name == "__init__":
                return of_function(node, method=True).removesuffix(" -> None")
        return next((self.signature(base) for base in self.bases(name)), "")

    def fields(self, name: Name) -> Iterator[str]:
        """The fields of a dataclass or NamedTuple, those of its bases first."""
        if not is_dataclass(name.node):
            return
        for base in self.bases(name):
            yield from self.fields(base)
        for node in name.node.body:
            if isinstance(node, ast.AnnAssign) and "init=False" not in ast.unparse(node):
                yield f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}{default(node)}"

    def comment(self, module: str, node: Node) -> str:
        """The comment at the end of a statement's first or last line."""
        lines = self.file(module).read_text().splitlines()
        last = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
        for line in (last, lines[node.lineno - 1]):
            _, mark, text = line.partition("  # ")
            if mark:
                return text
        return ""


def statements(body: Iterable[ast.stmt]) -> Iterator[Node]:
    """The statements of a module, also those under `if TYPE_CHECKING`."""
    for node in body:
        if isinstance(node, ast.If):
            yield from statements(node.body)
        else:
            yield node


def defined(node: Node) -> str | None:
    """The name that a statement defines."""
    if isinstance(node, ast.ClassDef | Function):
        return node.name
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0])
    return ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else None


def is_dataclass(node: ast.ClassDef) -> bool:
    made = [ast.unparse(each) for each in (*node.decorator_list, *node.bases)]
    return any(each.startswith(("dataclass", "NamedTuple")) for each in made)


def default(field: ast.AnnAssign) -> str:
    """The default of a dataclass's field."""
    value = ast.unparse(field.value) if field.value else ""
    if isinstance(field.value, ast.Call) and value.startswith("field("):
        given = {each.arg: ast.unparse(each.value) for each in field.value.keywords}
        made = f"{given['default_factory']}()" if "default_factory" in given else ""
        value = given.get("default", made)
    return f" = {value}" if value else ""


def of_function(node: Function, method: bool = False) -> str:
    """A function's signature; that of a method is without `self`."""
    arguments = ast.unparse(node.args)
    if method and "staticmethod" not in map(ast.unparse, node.decorator_list):
        arguments = arguments.partition(",")[2].strip()
    gives = ast.unparse(node.returns).strip("'") if node.returns else ""
    return f"({arguments})" + (f" -> {gives}" if gives else "")


def parameters(node: Function) -> list[str]:
    """The names of what a function takes."""
    given = node.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return [each.arg for each in named if each]
