"""What torch's `async_save` writes, and what becomes of it (lesson: scaling_out).

This rank copies what it is to write. Then a thread of torch's plans with those of the other ranks,
writes and finishes, while training goes on. What is ours: that of what several ranks have only one
makes a copy; and the writer's last act, which makes the folder a checkpoint.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    FileSystemWriter,
    Metadata,
    SavePlan,
    SavePlanner,
)
from torch.futures import Future

from minidist.saving import commit
from minidist.saving.naive import sync
from minidist.saving.parts import Offsets, Part

Parts = dict[str, Any]  # by entry, a Part, or a copy of what is no tensor
Gather = Callable[[Any], list[Any]]
Piece = tuple[str, Offsets]


class Shares:
    """Which pieces this rank writes: of those that several ranks have, one does. And the copies
    from which it does."""

    def __init__(self) -> None:
        self._mine: dict[Piece, Any] = {}
        self._own: set[Piece] = set()
        # Kept: new memory costs more than a copy.
        self._room: dict[Piece, torch.Tensor] = {}

    def changed(self, parts: Parts) -> bool:
        """Whether they are others than at the last save, when the ranks shared them out."""
        before, self._mine = self._mine, _described(parts)
        return self._mine != before

    def share_out(self, gather: Gather, rank: int) -> None:
        """All ranks do it together."""
        self._own, self._room = set(), {}
        everyone = gather(self._mine)
        holders: dict[Piece, list[int]] = {}
        for number, theirs in enumerate(everyone):
            for piece in theirs:
                holders.setdefault(piece, []).append(number)
        written = [0] * len(everyone)
        for piece, numbers in holders.items():
            shape, dtype, same = everyone[numbers[0]][piece]
            # What may differ by rank is that of the first. DistributedDataParallel gives all ranks
            # rank 0's buffers before the next pass.
            writer = min(numbers, key=written.__getitem__) if same else numbers[0]
            written[writer] += shape.numel() * dtype.itemsize
            if writer == rank:
                self._own.add(piece)

    def copy(self, parts: Parts) -> Parts:
        """Copies on the CPU of what this rank writes. The next call overwrites them."""
        copies, gpus = Parts(), set()
        for name, part in parts.items():
            if not isinstance(part, Part):
                if (name, ()) in self._own:
                    copies[name] = part
                continue
            pieces = {}
            for at, own in part.pieces.items():
                if (name, at) not in self._own:
                    continue
                if (name, at) not in self._room:
                    room = torch.empty(own.shape, dtype=own.dtype, pin_memory=own.is_cuda)
                    self._room[name, at] = room
                pieces[at] = self._room[name, at].copy_(own, non_blocking=own.is_cuda)
                gpus |= {own.device} if own.is_cuda else set()
            if pieces:
                copies[name] = Part(part.shape, part.dtype, pieces, part.same)
        for gpu in gpus:  # maybe not the current one
            torch.cuda.current_stream(gpu).synchronize()
        return copies


def _described(parts: Parts) -> dict[Piece, Any]:
    found: dict[Piece, Any] = {}
    for name, part in parts.items():
        if isinstance(part, Part):
            found |= {(name, at): (x.shape, x.dtype, part.same) for at, x in part.pieces.items()}
        else:
            found[name, ()] = torch.Size(), torch.uint8, False
    return found


class Copies(DefaultSavePlanner):
    """Torch's planner of these copies. (What `async_save` is given otherwise costs Python 0.1 ms an
    entry.)"""

    def __init__(self, copies: Parts) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._copies = copies

    def set_up_planner(
        self, state_dict: Parts, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Called by torch."""
        super().set_up_planner(self._copies, storage_meta, is_coordinator)


class Writer(FileSystemWriter):
    """Writes the files of a step, and when the disk holds them all, makes them a checkpoint."""

    def __init__(self, partial: Path, about: dict[str, Any], then: Callable[[], object]) -> None:
        """about: for the manifest. then: what rank 0 does when the checkpoint is whole."""
        super().__init__(partial, sync_files=False)
        self._about, self._then = about, then

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """This rank's file; its hash goes to rank 0 with the results."""
        with _named(self.path):
            results = super().write_data(plan, planner).wait()
            names = {result.storage_data.relative_path for result in results}
            stamps = {name: commit.synced_stamp(self.path / name) for name in names}
            sync(self.path)
        written: Future[Any] = Future()
        written.set_result((results, stamps))
        return written

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """On rank 0, when all ranks have written."""
        with _named(self.path):
            super().finish(metadata, [written for written, _ in results])
            stamps = {name: stamp for _, each in results for name, stamp in each.items()}
            stamps[".metadata"] = commit.synced_stamp(self.path / ".metadata")
            commit.commit(self.path, self._about, stamps)
            self._then()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Say which folder could not be written, in the disk's own words where torch has others."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        cause = cause or error
        raise RuntimeError(
            f"{path} could not be written: {type(cause).__name__}: {cause}. The checkpoints "
            "before it are untouched"
        ) from error
