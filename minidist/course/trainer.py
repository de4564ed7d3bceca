"""Parts of a trainer: the learner's own where there are any, else the solutions'. Lesson:
your_trainer.

    parts = trainer.parts()                # which are yours, and why the others are not
    my_zero = parts["my_zero"].along(group)    # on a rank: the answer, whose world is this group
"""

import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from minidist.course.checks import kept, solved


@dataclass(frozen=True)
class Part:
    """An accepted exercise: its check, its source, and whose it is."""

    check: str
    source: str
    whose: str

    def along(self, group: dist.ProcessGroup | None = None) -> Any:
        """The function or class, defined anew. Its `dist` is torch's, and its world is `group`."""
        module = ModuleType(self.check)
        exec(compile(self.source, f"{self.check}.py", "exec"), module.__dict__)
        if group is not None:
            module.__dict__["dist"] = World(group)
        return module.__dict__[kept.ANSWER]


class World:
    """torch.distributed for code that knows of no groups: here `group` is all there is, and ranks
    count within it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __getattr__(self, name: str) -> Any:
        function = getattr(dist, name)
        if not inspect.isfunction(function):
            return function
        signature = inspect.signature(function)
        if "group" not in signature.parameters:
            return function

        def within(*args: Any, **options: Any) -> Any:
            given = {"group": self.group} | signature.bind_partial(*args, **options).arguments
            for peer in {"src", "dst"} & given.keys():
                given[f"group_{peer}"] = given.pop(peer)
            return function(**given)

        return within


class Parts(dict[str, Part]):
    """The parts by the names of their checks. Shows whose each is."""

    def __repr__(self) -> str:
        lines = [
            f"{part.check:18}{kept.PARTS[part.check]:26}{part.whose}" for part in self.values()
        ]
        return "\n".join([f"{'part':18}{'lesson':26}whose", *lines])


def parts() -> Parts:
    """All parts. Of each that the learner has not written, or whose file is of no use, the
    solution's is taken; `whose` says why."""
    return Parts({check: part(check) for check in kept.PARTS})


def part(check: str) -> Part:
    """One of them. Raises KeyError for a check that is no part."""
    lesson, copy = kept.PARTS[check], solved.copy()
    try:
        if copy is None:
            raise ValueError("this is not your copy of the lessons")
        mine = Part(check, kept.read(copy, check), "yours")
        _must_define(mine)
    except ValueError as error:
        return Part(check, solution(lesson, check), f"the solution's: {error}")
    return mine


def _must_define(mine: Part) -> None:
    try:
        mine.along()
    except Exception as error:
        raise ValueError(f"does not import: {type(error).__name__}: {error}") from None


def solution(name: str, check: str) -> str:
    """The part as the solutions have it. Raises FileNotFoundError where they are not beside."""
    around = (at / "solutions" for at in (Path(), Path("..")))
    found = [path for at in around for path in at.glob(f"??_{name}.ipynb")]
    if not found:
        raise FileNotFoundError(f"no solutions/??_{name}.ipynb beside this notebook")
    cells = [cell for cell in json.loads(found[0].read_text("utf-8"))["cells"]]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    call = f"check.{check}("
    last = next(number for number, source in enumerate(sources) if call in source)
    answer = sources[last].partition(call)[2].partition(")")[0]
    defined = [kept.definitions(source) for source in sources[: last + 1]]
    return "\n\n\n".join(filter(None, defined)) + f"\n\n{kept.ANSWER} = {answer}\n"
