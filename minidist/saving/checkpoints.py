"""`save`, `load` and `wait` (lesson: scaling_out)."""

import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import index
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from minidist.common import agree
from minidist.common.groups import require_group
from minidist.saving import commit, rank_states
from minidist.saving.states import MODEL, States, merged, require_groups
from minidist.saving.writing import Copies, Parts, Shares, Writer

RANK = "rank."
GRACE = 2.0  # seconds that a save has to become whole after an error

# Of a process alone; torch says so at each save and load.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


class Checkpoints:
    """The checkpoints of one run, in a folder that all ranks see. Lesson: scaling_out.

        with md.saving.Checkpoints("runs/a") as checkpoints:
            step = checkpoints.load(model=model, optimizer=optimizer, data=batches) or 0
            ...
            checkpoints.save(step, model=model, optimizer=optimizer, data=batches)

    A checkpoint has the model, the optimizer, each rank's random numbers, and of what else is
    passed, by name, its `state_dict()`. The model may be bare or in any strategy, on any number of
    ranks. The run that loads may have another strategy and other ranks than the run that saved, and
    compile its model or not.

    folder: is made if it is missing. A second process that saves in it is refused; on NFS and
        Lustre from another machine, too, unless they are mounted without locks. Where the file
        system has none, a warning says so.
    keep: so many checkpoints stay, and older ones are deleted when a new one is whole.
    process_group: the ranks of the run; None is the default group, or this process alone where
        there is none.

    All ranks call all methods. Raises, on every rank, RuntimeError if another run has the folder,
    or it cannot be written (OSError, where there is no group); ValueError for a `keep` below 1.

    Limits: what a hook makes for a model's state is saved as it is on rank 0, like an extra state.
    An optimizer's state that is neither a number nor of its parameter's shape cannot be saved in
    parts: an error says so.
    """

    def __init__(
        self, folder: str | Path, keep: int = 2, process_group: dist.ProcessGroup | None = None
    ) -> None:
        self.folder, self.keep = Path(folder), keep
        alone = process_group is None and not (dist.is_available() and dist.is_initialized())
        self._group = None if alone else require_group(process_group, "Checkpoints")
        self._rank = 0 if self._group is None else dist.get_rank(self._group)
        self._lock: IO[str] | None = None
        self._saving: futures.Future[Any] | None = None
        self._shares = Shares()
        with self._together():
            self._open()
        self._id = self._gather(uuid4().hex[:8])[0]  # a run that was killed may still write
        self._gloo = None if self._group is None else _gloo_beside(self._group)

    def _open(self) -> None:
        if not isinstance(self.keep, int) or self.keep < 1:
            raise ValueError(f"keep must be a whole number, 1 or more, not {self.keep}")
        if self._rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = commit.lock(self.folder)
            commit.clear_partial(self.folder)

    # ---- save ------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        **others: Any,
    ) -> None:
        """Save everything as it is now. Returns when it is copied; a thread writes it.

        step: how many steps were trained; more than that of any checkpoint in the folder.
        others: anything with `state_dict` and `load_state_dict`, of tensors and plain values: the
            data, a scheduler, a scaler.

        Training stands still for a copy of what this rank writes, at the speed of memory, and for
        Python's look at each tensor. The disk gets it from the copy, which stays in memory for the
        next save. A program that ends without `close` may lose it.

        Waits for the save before, if that is still being written. Raises on every rank, and leaves
        nothing but older checkpoints: what `wait` raises; ValueError for a step that is not new, or
        an optimizer that is not the model's; TypeError for a step that is no whole number, or a
        state that no `load` could read.
        """
        self.wait()
        with self._together():
            step = index(step)
            parts = self._parts(model, optimizer, others)
            newest = max(commit.steps_in(self.folder), default=-1) if self._rank == 0 else -1
            if step <= newest or step < 0:
                raise ValueError(
                    f"step {step} is not new: {self.folder} has step {newest} already. A run goes "
                    "on from there by load(); another run takes another folder"
                )
        gathered = self._gather((step, self._shares.changed(parts)))
        steps = [each for each, _ in gathered]
        if min(steps) < max(steps):
            raise ValueError(f"the ranks save different steps: {steps}")
        if any(changed for _, changed in gathered):
            self._shares.share_out(self._gather, self._rank)
        self._partial = self.folder / f"step-{step:08}.{self._id}{commit.PARTIAL}"
        about = {"step": step, "world_size": len(gathered)}
        saving: Any = dcp.async_save(
            {},
            planner=Copies(self._shares.copy(parts)),
            storage_writer=Writer(
                self._partial, about, lambda: commit.clear(self.folder, self.keep)
            ),
            process_group=self._gloo,
            no_dist=self._gloo is None,
        )
        self._saving = saving

    def _parts(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, others: Mapping[str, Any]
    ) -> Parts:
        for name, each in others.items():
            if not hasattr(each, "state_dict"):
                raise TypeError(f"{name} has no state_dict() to save: it is {each!r:.60}")
        states = States(model, optimizer)
        own = {n: rank_states.copied(n, each.state_dict()) for n, each in others.items()}
        groups = rank_states.copied("the optimizer's groups", states.groups())
        record = {"random": rank_states.capture(), "groups": groups, "others": own}
        return states.of_model() | states.of_optimizer() | {f"{RANK}{self._rank}": record}

    def wait(self) -> None:
        """Until the last save is whole on the disk. Raises RuntimeError on every rank, that names
        rank and folder, if a rank could not write: a full disk, for instance."""
        if self._saving is None:
            return
        futures.wait([self._saving])
        saving, self._saving = self._saving, None
        try:
            with _telling_rank():
                saving.result()
        except Exception:
            if self._rank == 0:
                shutil.rmtree(self._partial, ignore_errors=True)
            raise

    # ---- load ------------------------------------------------------------------------------

    def load(
        self, *, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **others: Any
    ) -> int | None:
        """Load the newest checkpoint, and return its step; None if there is none yet.

        What a killed run has not finished does not count. Every file is read and compared with its
        hash, shared out over the ranks, before anything changes. Raises ValueError on every rank,
        and changes nothing, if a file is missing, cut short or changed, or of another format, or if
        the checkpoint is of another model or optimizer.
        """
        self.wait()
        with self._together():
            own = commit.steps_in(self.folder) if self._rank == 0 else {}
        steps = self._gather(own)[0]
        if not steps:
            return None
        step, folder = max(steps), steps[max(steps)]
        with _telling(folder, steps):
            self._load(step, folder, model, optimizer, others)
        return step

    def _load(
        self,
        step: int,
        folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        others: Mapping[str, Any],
    ) -> None:
        ranks, rank = len(self._gather(None)), self._rank
        with self._together():
            states = States(model, optimizer)
            manifest = commit.manifest_of(folder)
            if manifest["step"] != step:
                raise ValueError(f"{folder} is of step {manifest['step']}: somebody has renamed it")
            for name, stamp in list(manifest["files"].items())[rank::ranks]:
                commit.require_stamp(folder / name, stamp)
        with self._together():
            saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
            rooms = states.rooms(saved)
        gathered = self._gather((set(rooms), states.groups()))
        records: Parts = {f"{RANK}{each}": None for each in range(manifest["world_size"])}
        self._read(folder, records)
        with self._together():
            known = set[str]().union(*(names for names, _ in gathered))
            if more := {name for name in saved if name.startswith(MODEL)} - known:
                name = min(more).removeprefix(MODEL)
                raise ValueError(f"it is of another model: it has {name} as well")
            groups = merged([record["groups"] for record in records.values()])
            if optimizer is not None:
                require_groups(merged([own for _, own in gathered]), groups)
            own = [record["others"] for record in records.values()]
            found = {name: rank_states.state_for(name, own, rank, ranks) for name in others}
            random = [record["random"] for record in records.values()]
        del records, own  # the states of all ranks
        self._read(folder, rooms)
        with self._together():
            states.put(rooms, groups)
            for name, state in found.items():
                others[name].load_state_dict(state)
            rank_states.restore(random, rank)

    def _read(self, folder: Path, parts: Parts) -> None:
        with _telling_rank():
            dcp.load(
                parts,
                storage_reader=dcp.FileSystemReader(folder),
                planner=dcp.DefaultLoadPlanner(False, flatten_sharded_tensors=False),
                process_group=self._gloo,
                no_dist=self._gloo is None,
            )

    # ---- the end ---------------------------------------------------------------------------

    def close(self) -> None:
        """Wait, and let the next run have the folder."""
        try:
            self.wait()
        finally:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """After an error the other ranks may be gone: what can still become whole gets some
        seconds, and no rank is asked."""
        if error is None:
            self.close()
        else:
            if futures.wait([self._saving] if self._saving else [], GRACE).not_done:
                _GLOO.pop(self._group, None)  # it is in use
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # ---- together --------------------------------------------------------------------------

    def _gather(self, mine: Any) -> list[Any]:
        return [mine] if self._group is None else agree.gather(self._group, mine)

    def _together(self) -> AbstractContextManager[None]:
        """What one rank raises within the block, all ranks raise after it."""
        return nullcontext() if self._group is None else agree.together(self._group)


_GLOO: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _gloo_beside(group: dist.ProcessGroup) -> Any:
    """The same ranks, for torch's thread: its messages must not meet those of training."""
    if group not in _GLOO:
        ranks = dist.get_process_group_ranks(group)
        _GLOO[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _GLOO[group]


@contextmanager
def _telling_rank() -> Iterator[None]:
    """Say of what torch's checkpoints raise on all ranks what happened on the first of them."""
    try:
        yield
    except CheckpointException as error:
        rank, (problem, _) = min(error.failures.items(), key=lambda each: each[0])
        raise RuntimeError(f"rank {rank}: {problem}") from problem


@contextmanager
def _telling(folder: Path, steps: Mapping[int, Path]) -> Iterator[None]:
    """Say of a failed load which checkpoint it was, and what to do."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        before = list(steps.values())[-2:-1]
        onward = f". To go on from {before[0]}, move it away" if before else ""
        raise type(error)(f"{folder} does not load: {error}{onward}") from error
