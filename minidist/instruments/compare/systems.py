"""What is compared: a list that other modules add to."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from minidist.instruments.planner import Layout

MODULES = ["our_systems", "torch_systems", "tool_systems"]
"""Of this room. Each has SYSTEMS, a list of `System`."""


class RefusedError(ValueError):
    """A system cannot take this model, and why. Lesson: real_tools."""


@dataclass(frozen=True)
class System:
    """A way to train: `train(task, watch)` on every rank; see `md.compare`.
    Lesson: real_tools.

    name: what the table and `--only` call it.
    one_process: it is not for ranks, and runs in a single process (DataParallel, for instance).
    peer: not minidist's; it runs with `--peers`, or if `--only` names it.
    needs: the packages that it imports, by their import names; install: how to get them.
    float64: whether it can train in float64. If not, it is compared in float32.
    stage: of ZeRO, for the bytes that the planner has of it: 0 for DDP, to 3.
    layout: of a task: the mesh of ranks whose messages the planner knows. A system without stage
        and layout has no planned bytes.
    timeout: seconds that a rank of it waits for another.
    """

    name: str
    train: Callable[[Any, Any], Any]
    one_process: bool = False
    peer: bool = False
    needs: tuple[str, ...] = ()
    install: str = 'pip install "minidist[tools]"'
    float64: bool = True
    stage: int | None = None
    layout: Callable[[Any], Layout] | None = None
    timeout: float = 60

    def missing(self) -> list[str]:
        """Which packages it needs and are not installed. Imports nothing."""
        return [package for package in self.needs if find_spec(package) is None]


def systems() -> list[System]:
    """All of them, in the order of the table: one process first. Lesson: real_tools."""
    modules = [importlib.import_module(f"minidist.instruments.compare.{name}") for name in MODULES]
    return [system for module in modules for system in module.SYSTEMS]
