"""The storages that hold tensors, followed from the op that makes them to their end."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What a storage can be, the strongest evidence first: a gradient that is handed to a collective
# is a gradient, and an input that came from another rank and is kept for backward an activation.
CATEGORIES = (
    "parameters",
    "buffers",
    "optimizer states",
    "gradients",
    "activations",
    "communication buffers",
    "other",
)


class Record:
    """One storage: the strongest evidence so far of what it is, and its size in bytes."""

    def __init__(self, nbytes: int) -> None:
        self.rank = len(CATEGORIES) - 1  # of its category; 0 is the strongest
        self.nbytes = nbytes
        self.life: weakref.ref[torch.UntypedStorage]


class Ledger(TorchDispatchMode):
    """While active, notes every change of the bytes that live on `device`, in order.

    `before` are the storages, with their bytes, that were there when it became active, as far as
    `mark` has been told of them; `changes` are (storage, bytes more or less).

    A storage is known by its address. Torch keeps the Python object of a storage for as long as
    the storage lives, so a weak reference to it ends exactly when the memory is freed.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.before: list[tuple[Record, int]] = []
        self.changes: list[tuple[Record, int]] = []
        self._live: dict[int, Record] = {}
        # Of what is a part of another storage.
        self._whole: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented  # a DTensor: its own ops, on what it holds, come here next
        # `torch.tensor` fills the tensor that it makes before any mode can see it.
        given = [] if func is torch.ops.aten.lift_fresh.default else list(storages((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        old = {storage._cdata for storage in given}
        for storage in storages(result):
            if storage._cdata in self._live:
                self.measure(storage)
            elif storage._cdata not in old and (made := self._admit(storage)):
                self.changes.append((made, made.nbytes))
        if "c10d" in func.namespace:
            self.mark((args, kwargs, result), "communication buffers")
        return result

    def join(self, whole: torch.Tensor, parts: Iterable[torch.Tensor]) -> None:
        """The storages of the parts are slices of the whole one's, which counts in their place."""
        storage = whole.untyped_storage()
        self._whole |= {part._cdata: weakref.ref(storage) for part in storages(list(parts))}

    def mark(self, tensors: Any, category: str, admit: bool = True) -> None:
        """The tensors, in any nesting, are `category`, and were so since they were made.

        A storage that no op has made within the block was there before; it counts from the
        start if `admit`, else not at all.
        """
        rank = CATEGORIES.index(category)
        for part in storages(tensors):
            whole = self._whole.get(part._cdata, lambda: None)()
            storage = part if whole is None else whole
            found = self._live.get(storage._cdata)
            if found is None and admit and (found := self._admit(storage)):
                self.before.append((found, found.nbytes))
            if found:
                found.rank = min(found.rank, rank)

    def records(self, tensors: Any) -> list[Record]:
        """Those of the tensors' storages that are followed, in any nesting."""
        found = (self._live.get(storage._cdata) for storage in storages(tensors))
        return [record for record in found if record]

    def measure(self, storage: torch.UntypedStorage) -> None:
        """It may have been resized."""
        record = self._live.get(storage._cdata)
        if record and (change := storage.nbytes() - record.nbytes):
            record.nbytes += change
            self.changes.append((record, change))

    def live(self) -> int:
        """The bytes of all that was made since, and is there now."""
        found = [record.life() for record in self._live.values()]
        return sum(storage.nbytes() for storage in found if storage is not None)

    def history(self) -> dict[str, list[int]]:
        """Live bytes by category: at the start, then after each change."""
        live = [0] * len(CATEGORIES)
        for record, nbytes in self.before:
            live[record.rank] += nbytes
        rows = [tuple(live)]
        for record, nbytes in self.changes:
            live[record.rank] += nbytes
            rows.append(tuple(live))
        return dict(zip(CATEGORIES, map(list, zip(*rows, strict=True)), strict=True))

    def _admit(self, storage: torch.UntypedStorage) -> Record | None:
        if storage.device != self.device:  # also what is on "meta"
            return None
        key, record = storage._cdata, Record(storage.nbytes())
        record.life = weakref.ref(storage, lambda _: self._free(key))
        self._live[key] = record
        return record

    def _free(self, key: int) -> None:
        record = self._live.pop(key)
        if record.nbytes:
            self.changes.append((record, -record.nbytes))


def storages(tensors: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of tensors in any nesting, one for each tensor. A sparse tensor has none: its
    indices and values have. The storages of a DTensor are those of what this rank holds."""
    for leaf in tree_leaves(tensors):
        if isinstance(leaf, torch.UntypedStorage):
            yield leaf
        elif not isinstance(leaf, torch.Tensor):
            continue
        elif is_wrapper(type(leaf)):
            names, _ = leaf.__tensor_flatten__()  # type: ignore[attr-defined]
            yield from storages([getattr(leaf, name) for name in names])
        elif leaf.layout is torch.strided:
            yield leaf.untyped_storage()


def is_wrapper(kind: type) -> bool:
    """Whether tensors of this kind hold other tensors, and no memory of their own."""
    return hasattr(kind, "__tensor_flatten__")
