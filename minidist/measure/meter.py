"""What the meters share: they listen to the record within a `with` block (lesson 2)."""

import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, Self

import torch.distributed as dist

from minidist.measure import record
from minidist.measure.record import Event


class Meter(ABC):
    """Listens to what one rank communicates within a `with` block. `rank` is ours.

    After the block a meter is plain data, which a rank can return: only public attributes are
    pickled. Raises RuntimeError when entered twice at the same time.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = _place()
        self._observation: AbstractContextManager[list[Event]] | None = None
        self._events: list[Event] = []

    @abstractmethod
    def _read(self, events: list[Event]) -> None:
        """Make of the events what is shown."""

    def __enter__(self) -> Self:
        if self._observation is not None:
            raise RuntimeError(f"this {type(self).__name__} is in use already")
        self.__init__()  # type: ignore[misc]
        self._observation = record.observed()
        self._events = self._observation.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        assert self._observation is not None
        self._observation.__exit__(None, None, None)
        self._read(self._events)
        self._observation, self._events = None, []

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        vars(self).update(state)


def _place() -> tuple[int, int]:
    """Our rank and the world size: of the default group, else of the environment, else (0, 1)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
