"""Who writes which box, from which copies, to which of torch's files (lesson: scaling_out).

The plan is torch's: each rank says what it has, and of what several have, one writes it. That is
all that ranks say to each other, and while the entries stay the same they say it once. Then each
copies what it is to write, and training goes on; a thread writes the copies.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from minidist.saving.boxes import Boxed
from minidist.saving.whole_states import Entries

Gather = Callable[[Any], list[Any]]
Copies = Mapping[MetadataIndex, Any]


class BoxPlan:
    """What each rank writes of some entries. It serves as long as they stay the same."""

    def __init__(self, entries: Entries, gather: Gather, rank: int) -> None:
        """All ranks make it together."""
        plans = gather(create_default_local_save_plan(entries, rank == 0))
        planner = DefaultSavePlanner(flatten_state_dict=False)
        self.described = describe(entries)
        # Each rank makes the plan of all ranks, the same one: it is not sent.
        plans, self.metadata = planner.create_global_plan(_first_writes(plans))
        self.own: SavePlan = plans[rank]
        self._rank = rank
        # Kept: new memory costs more than a copy.
        self._room: dict[MetadataIndex, torch.Tensor] = {}

    def copy(self, entries: Entries) -> Copies:
        """Copies on the CPU of what this rank writes. The next call overwrites them."""
        copies: dict[MetadataIndex, Any] = {}
        gpus = set()
        for item in self.own.items:
            entry = entries[item.index.fqn]
            if not isinstance(entry, Boxed):
                copies[item.index] = io.BytesIO()
                torch.save(entry, copies[item.index])
                continue
            view = entry.view(item.index.offset)
            if item.index not in self._room:
                self._room[item.index] = torch.empty(
                    view.shape, dtype=view.dtype, pin_memory=view.is_cuda
                )
            copies[item.index] = self._room[item.index].copy_(view, non_blocking=view.is_cuda)
            gpus |= {view.device} if view.is_cuda else set()
        for gpu in gpus:  # maybe not the current one
            torch.cuda.current_stream(gpu).synchronize()
        return copies

    def write(self, folder: Path, copies: Copies) -> list[WriteResult]:
        """Write the copies into this rank's file of the folder. For a thread: it communicates with
        nobody."""
        writer = FileSystemWriter(folder, sync_files=False, thread_count=1)
        plans = [SavePlan([]) for _ in range(self._rank)] + [self.own]
        plan = writer.prepare_global_plan(plans)[self._rank]  # names the rank's file
        results: list[WriteResult] = writer.write_data(plan, _Copies(copies)).wait()
        return results

    def finish(self, folder: Path, results: Sequence[list[WriteResult]]) -> None:
        """Write the file that says in which file each box is. For rank 0's thread."""
        writer = FileSystemWriter(folder, sync_files=False)
        writer.finish(replace(self.metadata), list(results))


def _first_writes(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """What may differ by rank is that of the first rank. DistributedDataParallel gives all ranks
    rank 0's buffers before the next pass; had another rank written its own, a run that goes on
    would be another one."""
    seen: set[MetadataIndex] = set()
    kept = []
    for plan in plans:
        kept.append(
            replace(
                plan,
                items=[
                    item
                    for item in plan.items
                    if item.type == WriteItemType.SHARD or item.index not in seen
                ],
            )
        )
        seen |= {item.index for item in plan.items}
    return kept


def describe(entries: Entries) -> list[Any]:
    """All that a plan depends on."""
    return [
        (name, tuple(each.shape), each.own.dtype, [(box.offsets, box.sizes) for box in each.boxes])
        if isinstance(each, Boxed)
        else name
        for name, each in entries.items()
    ]


def read_metadata(folder: Path) -> Metadata:
    """Which entries a folder has, in which boxes, and where."""
    return FileSystemReader(folder).read_metadata()


def read(folder: Path, metadata: Metadata, entries: Entries) -> Entries:
    """Fill the tensors of the entries, and read what is no tensor. Each rank reads what it needs,
    and waits for no other."""
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, True)
    into = dict(entries)
    plan = create_default_local_load_plan(into, metadata)
    reader.read_data(plan, _Rooms(into)).wait()
    return into


class _Copies(DefaultSavePlanner):
    """What the writer asks for data."""

    def __init__(self, copies: Copies) -> None:
        super().__init__(flatten_state_dict=False)
        self._copies = copies

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._copies[write_item.index]


class _Rooms(DefaultLoadPlanner):
    """What the reader asks where to put data."""

    def __init__(self, into: Entries) -> None:
        super().__init__(flatten_state_dict=False)
        self._into = into

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # This rank may have another GPU than the one that saved, or none.
        self._into[read_item.dest_index.fqn] = torch.load(
            value, map_location="cpu", weights_only=True
        )

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        view: torch.Tensor = self._into[index.fqn].view(index.offset)
        return view
