"""A device of so many bytes, emulated where there is none (lesson: offload)."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from minidist.measure import MemoryTracker
from minidist.measure.storages import CATEGORIES, Ledger, Record, storages

_within = ContextVar("within on_host", default=False)


class OutOfMemory(torch.OutOfMemoryError):
    """An allocation that does not fit: on an emulated device, or on the host.
    Lesson: offload."""


@contextmanager
def on_host() -> Iterator[None]:
    """What is allocated within this block is in the host's memory, not on the emulated device.
    Lesson: offload."""
    token = _within.set(True)
    try:
        yield
    finally:
        _within.reset(token)


def put_on_host(tensors: Any) -> None:
    """Count these tensors, in any nesting, as the host's from now on. Use it for tensors that were
    made outside of any `Budget`. With a real device it is not needed. Lesson: offload."""
    for storage in storages(tensors):
        storage.on_host = True  # type: ignore[attr-defined]


class Budget(MemoryTracker):
    """A device with `nbytes` of memory, for a `with` block. An allocation beyond that raises
    `OutOfMemory`, with a table of what holds the memory. Lesson: offload.

        with md.offload.Budget(2_000_000, model, optimizer) as device:
            train(model, optimizer)
        print(device.peak)

    Everything else is as with `md.measure.MemoryTracker`: what counts, and what is measured. But
    what is on the host, by `on_host` or `put_on_host`, does not count, even if host and device are
    one memory. A real device can have a budget too, below its own.

    Raises `OutOfMemory` at the allocation that would be too much; before the block, if model and
    optimizer are too large already. As with a device's own error, the tensor is not made, and the
    op that asked for it does not return.
    """

    def __init__(
        self, nbytes: int, module: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        super().__init__(module, optimizer)
        self.nbytes = nbytes

    def _make_ledger(self, device: torch.device) -> Ledger:
        return _LimitedLedger(device, self.nbytes)


class _LimitedLedger(Ledger):
    def __init__(self, device: torch.device, nbytes: int) -> None:
        super().__init__(device)
        self._budget = nbytes

    def _admit(self, storage: torch.UntypedStorage) -> Record | None:
        if _within.get():
            put_on_host(storage)
        if getattr(storage, "on_host", False):
            return None
        if storage.device == self.device:
            self._require_room(storage.nbytes())
        return super()._admit(storage)

    def measure(self, storage: torch.UntypedStorage) -> None:
        if known := self._live.get(storage._cdata):
            self._require_room(storage.nbytes() - known.nbytes)
        super().measure(storage)

    def _require_room(self, more: int) -> None:
        live = list(self._live.values())  # other threads may free some meanwhile
        used = sum(record.nbytes for record in live)
        if more > 0 and used + more > self._budget:
            held = {k: sum(x.nbytes for x in live if CATEGORIES[x.rank] == k) for k in CATEGORIES}
            rows = [f"  {name:<22}{nbytes:>15,}" for name, nbytes in held.items() if nbytes]
            raise OutOfMemory(
                f"no room on the device ({self.device.type}) for {more:,} bytes more: of "
                f"{self._budget:,} bytes {used:,} are in use\n" + "\n".join(rows)
            )
