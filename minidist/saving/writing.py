"""What torch's `async_save` writes, and what becomes of it (lesson: surviving_failures).

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
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import WriteItemType
from torch.futures import Future

from minidist.saving import commit
from minidist.saving.naive import sync
from minidist.saving.parts import Part

Parts = dict[str, Any]  # by entry, a Part, or a copy of what is no tensor
Piece = tuple[str, Any]  # an entry, and where the piece begins


class Shares:
    """Which pieces this rank writes: of those that several ranks have, one does. And the copies
    from which it does."""

    def __init__(self) -> None:
        self._described: dict[Piece, Any] = {}
        self._own: set[Piece] = set()
        # Kept: new memory costs more than a copy.
        self._room: dict[Piece, torch.Tensor] = {}

    def changed(self, parts: Parts) -> bool:
        """Whether the pieces are others than those that the ranks have shared out."""
        before, self._described = self._described, {}
        for name, part in parts.items():
            pieces = part.pieces if isinstance(part, Part) else {None: torch.empty(0)}
            self._described |= {(name, at): (x.shape, x.dtype) for at, x in pieces.items()}
        return self._described != before

    def share_out(self, parts: Parts, gather: Callable[[Any], list[Any]], rank: int) -> None:
        """All ranks do it together, when they have changed on one. As torch does it, but that what
        may differ by rank is that of the first: DistributedDataParallel gives all ranks rank 0's
        buffers before the next pass."""
        self._own, self._room = set(), {}
        plans = gather(create_default_local_save_plan(parts, True))
        for same in (True, False):
            kept = [[i for i in p.items if (i.type == WriteItemType.SHARD) == same] for p in plans]
            own = dedup_save_plans(list(map(SavePlan, kept)), save_to_lowest_rank=not same)[rank]
            self._own |= {(item.index.fqn, item.index.offset) for item in own.items}

    def copy(self, parts: Parts) -> Parts:
        """Copies on the CPU of what this rank writes. The next call overwrites them."""
        copies: Parts = {}
        for name, part in parts.items():
            if isinstance(part, Part):
                own = {at: x for at, x in part.pieces.items() if (name, at) in self._own}
                pieces = {at: self._copied((name, at), x) for at, x in own.items()}
                copies[name] = Part(part.shape, part.dtype, pieces, part.same)
            elif (name, None) in self._own:
                copies[name] = part
        return copies

    def _copied(self, piece: Piece, own: torch.Tensor) -> torch.Tensor:
        if piece not in self._room:
            room = torch.empty(own.shape, dtype=own.dtype, pin_memory=own.is_cuda)
            self._room[piece] = room
        return self._room[piece].copy_(own)


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

    path: Path

    def __init__(self, partial: Path, about: dict[str, Any], keep: int) -> None:
        """about: for the manifest. keep: so many checkpoints stay then."""
        super().__init__(partial, sync_files=False)
        self._about, self._keep = about, keep

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
            commit.clear(self.path.parent, self._keep)


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
