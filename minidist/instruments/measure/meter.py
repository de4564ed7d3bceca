"""What the measuring blocks share: entered and left, they become plain data."""

import contextlib
import os
from abc import ABC, abstractmethod
from typing import Any, Self

import torch.distributed as dist

from minidist.instruments.measure import record
from minidist.instruments.measure.record import Event


class Measurement(ABC):
    """Measures what one rank does within a `with` block. `rank` is ours.

    After the block it is plain data, which a rank can return: only public attributes are
    pickled. Raises RuntimeError when entered twice at the same time.
    """

    _running: contextlib.ExitStack | None = None

    def __init__(self) -> None:
        self.rank, self.world_size = _place()

    @abstractmethod
    def _begin(self, block: contextlib.ExitStack) -> None:
        """Forget what was measured before and watch. `block` undoes what is put upon it."""

    @abstractmethod
    def _end(self) -> None:
        """Make of what was seen what is shown."""

    def __enter__(self) -> Self:
        if self._running is not None:
            raise RuntimeError(f"this {type(self).__name__} is in use already")
        self.rank, self.world_size = _place()
        with contextlib.ExitStack() as block:
            self._begin(block)
            self._running = block.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        assert self._running is not None
        block, self._running = self._running, None
        block.close()
        self._end()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


class Meter(Measurement):
    """Listens to what one rank communicates within a `with` block."""

    _events: list[Event]

    @abstractmethod
    def _read(self, events: list[Event]) -> None:
        """Make of the events what is shown."""

    def _begin(self, block: contextlib.ExitStack) -> None:
        self.__init__()  # type: ignore[misc]
        self._events = block.enter_context(record.observed())

    def _end(self) -> None:
        self._read(self._events)
        del self._events


def _place() -> tuple[int, int]:
    """Our rank and the world size: of the default group, else of the environment, else (0, 1)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
