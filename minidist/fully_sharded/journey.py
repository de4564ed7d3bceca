"""The way that a backward pass goes back. Lesson: fully_sharded"""

import itertools

import torch

from minidist.fully_sharded.flat import FlatParameter
from minidist.fully_sharded.unit import Unit


class Visit:
    """A forward pass of a unit, and the one that ended before it did: the next in the backward
    pass. `task` is the backward pass that has come to it."""

    def __init__(self, unit: Unit, previous: "Visit | None") -> None:
        self.unit, self.previous = unit, previous
        self.since = torch.autograd._get_sequence_nr()  # the first node of its graph
        self.task: int | None = None
        self.entered = self.left = 0  # places in the journey

    def place(self, flat: FlatParameter) -> int:
        """In the journey, of the event that it was gathered."""
        return self.entered + self.unit.flats.index(flat)


class Journey:
    """What happened in a forward pass of the root, in this order, the same on all ranks: a flat
    parameter of a unit was gathered (visit, flat), a unit was left (visit, None).

    Autograd goes back in exactly this order, node by node: a backward pass that comes to an event
    has done with all that was later. What it has not come to by then is not in this rank's graph.
    It may be in another rank's: gather and reduce it all the same.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self._numbers)
        self.events: list[tuple[Visit, FlatParameter | None]] = []


def in_backward() -> bool:
    """Whether autograd computes a backward pass, on this thread."""
    return torch._C._current_graph_task_id() != -1
