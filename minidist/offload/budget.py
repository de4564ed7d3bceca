"""A device of so many bytes, where there is none, and what travels to it (lesson: offload)."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from minidist.common.tensors_in import tensors_of
from minidist.instruments.measure import MemoryTracker
from minidist.instruments.measure.storages import CATEGORIES, Ledger, Record, is_wrapper, storages

_within = ContextVar("within on_host", default=False)


class OutOfMemory(torch.OutOfMemoryError):
    """An allocation that does not fit on an emulated device. Lesson: offload."""


@contextmanager
def on_host() -> Iterator[None]:
    """What is allocated within this block is the host's, not the device's. Lesson: offload."""
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

    A `MemoryTracker`, but what is on the host, by `on_host` or `put_on_host`, does not count. If
    model and optimizer are too large already, it raises before the block."""

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


class Crossings(TorchDispatchMode):
    """Counts the bytes that ops read on one side and write on the other, in a `with` block.

        with md.offload.Budget(10**9, model, optimizer), md.offload.Crossings() as crossed:
            optimizer.step()
        print(crossed.to_host, crossed.to_device)       # bytes

    Use it within a `Budget`, which knows what is on the host. Lesson: offload."""

    def __init__(self) -> None:
        super().__init__()
        self.to_host = self.to_device = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented  # a DTensor: its own ops, on what it holds, come here next
        result = func(*args, **(kwargs or {}))
        if "_like" in str(func) or ".new_" in str(func):
            return result  # reads a tensor's shape, not its values
        written = {x.untyped_storage()._cdata: x for x in tensors_of(result)}
        sides = {_is_on_host(x) for x in written.values()}
        for x in tensors_of((args, kwargs)):
            if x.untyped_storage()._cdata not in written:
                from_host = _is_on_host(x)
                self.to_device += x.nbytes * (from_host and False in sides)
                self.to_host += x.nbytes * (not from_host and True in sides)
        return result


class HostLink:
    """An emulated link to the host: bytes arrive one after the other, so many a second, beside what
    the device computes. `send` books them, and `wait` sleeps until all have arrived. Lesson:
    offload."""

    def __init__(self, speed: float = float("inf")) -> None:
        self.speed, self.free_at = speed, 0.0

    def send(self, nbytes: float) -> None:
        self.free_at = max(time.perf_counter(), self.free_at) + nbytes / self.speed

    def wait(self) -> None:
        time.sleep(max(0.0, self.free_at - time.perf_counter()))


def _is_on_host(tensor: torch.Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "on_host", False)
