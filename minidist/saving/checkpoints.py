"""`save`, `load` and `wait` (lesson: surviving_failures)."""

import fcntl
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import index
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

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
    """The checkpoints of one run, in a folder that all ranks see. Lesson: surviving_failures.

        with md.saving.Checkpoints("runs/a") as checkpoints:
            step = checkpoints.load(model=model, optimizer=optimizer, data=batches) or 0
            ...
            checkpoints.save(step, model=model, optimizer=optimizer, data=batches)

    A checkpoint has the model, the optimizer, each rank's random numbers, and of what else is
    passed, by name, its `state_dict()`. The model may be bare or in any strategy, on any number of
    ranks; the run that loads may have another strategy and other ranks.

    folder: is made if it is missing. All ranks see it. Another run that opens it is refused.
    keep: so many checkpoints stay; older ones are deleted when a new one is whole.

    The ranks are those of the default group, or this process alone where there is none. All ranks
    call all methods. Raises, on every rank, RuntimeError if another run has the folder, or it
    cannot be written (OSError, where there is no group); ValueError for a `keep` below 1.

    Limits: without `close`, or the `with` block, the last save may be lost. No model with
    `get_extra_state`: pass that by a name of its own. Random numbers go by rank: after a load on
    another mesh, seed again where ranks along tensor must draw the same.
    """

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        self.folder, self.keep = Path(folder), keep
        grouped = dist.is_available() and dist.is_initialized()
        self._group = require_group(None, "Checkpoints") if grouped else None
        self._rank = dist.get_rank() if grouped else 0
        self._saving: futures.Future[Any] | None = None
        self._shares = Shares()
        with self._together():
            if keep < 1:
                raise ValueError(f"keep must be 1 or more, not {keep}")
            if self._rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock = commit.lock(self.folder)
                commit.clear_partial(self.folder)
        self._id = self._gather(uuid4().hex[:8])[0]  # a run that was killed may still write
        # For torch's thread: its messages must not meet those of training.
        self._gloo: Any = dist.new_group(backend="gloo") if grouped else None
        if grouped:
            dist.barrier(self._gloo)  # who closes at once would cut off who still connects

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

        Training stands still for a copy of what this rank writes, and for Python's look at each
        tensor. Waits for the save before, if that is still being written. Raises on every rank, and
        leaves nothing but older checkpoints: what `wait` raises; ValueError for a step that is not
        new, or an optimizer that is not the model's; TypeError for a step that is no whole number,
        or a state that no `load` could read.
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
        if any(changed for _, changed in gathered):
            self._shares.share_out(parts, self._gather, self._rank)
        steps = [each for each, _ in gathered]
        if min(steps) < max(steps):
            raise ValueError(f"the ranks save different steps: {steps}")
        self._partial = self.folder / f"step-{step:08}.{self._id}{commit.PARTIAL}"
        about = {"step": step, "world_size": len(steps)}
        saving: Any = dcp.async_save(
            {},
            planner=Copies(self._shares.copy(parts)),
            storage_writer=Writer(self._partial, about, self.keep),
            process_group=self._gloo,
            no_dist=self._gloo is None,
        )
        self._saving = saving

    def _parts(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, others: Mapping[str, Any]
    ) -> Parts:
        states = States(model, optimizer)
        own = {name: rank_states.state_of(name, each) for name, each in others.items()}
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
            with _naming_rank():
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
            states = States(model, optimizer)
            own = commit.steps_in(self.folder) if self._rank == 0 else {}
        steps = self._gather(own)[0]
        if not steps:
            return None
        (step, folder), *older = reversed(steps.items())
        try:
            self._load(step, folder, states, others)
        except (ValueError, RuntimeError) as error:
            onward = f". To go on from {older[0][1]}, move it away" if older else ""
            raise type(error)(f"{folder} does not load: {error}{onward}") from error
        return step

    def _load(self, step: int, folder: Path, states: States, others: Mapping[str, Any]) -> None:
        ranks = len(self._gather(None))
        with self._together():
            manifest = commit.manifest_of(folder)
            if manifest["step"] != step:
                raise ValueError(f"{folder} is of step {manifest['step']}: somebody has renamed it")
            for name, stamp in list(manifest["files"].items())[self._rank :: ranks]:
                commit.require_stamp(folder / name, stamp)
        with self._together():
            saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
            rooms = states.rooms(saved)
        gathered = self._gather((set(rooms), states.groups()))
        with self._together():
            known = set[str]().union(*(names for names, _ in gathered))
            if more := {name for name in saved if name.startswith(MODEL)} - known:
                name = min(more).removeprefix(MODEL)
                raise ValueError(f"it is of another model: it has {name} as well")
        records: Parts = {f"{RANK}{each}": None for each in range(manifest["world_size"])}
        self._read(folder, records)
        random, groups, own = (
            [record[what] for record in records.values()] for what in ("random", "groups", "others")
        )
        with self._together():
            if states.optimizer is not None:
                require_groups(merged([each for _, each in gathered]), merged(groups))
            found = {n: rank_states.state_for(n, own, self._rank, ranks) for n in others}
        self._read(folder, rooms)
        with self._together():
            states.put(rooms, merged(groups))
            for name, state in found.items():
                others[name].load_state_dict(state)
            rank_states.restore(random, self._rank)

    def _read(self, folder: Path, parts: Parts) -> None:
        with _naming_rank():
            dcp.load(
                parts,
                storage_reader=dcp.FileSystemReader(folder),
                planner=dcp.DefaultLoadPlanner(False, flatten_sharded_tensors=False),
                process_group=self._gloo,
                no_dist=self._gloo is None,
            )

    # ---- the end ---------------------------------------------------------------------------

    def close(self) -> None:
        """Wait until the last save is whole, and let the next run have the folder."""
        self.wait()
        self._unlock()
        if self._gloo is not None and dist.is_initialized():
            dist.destroy_process_group(self._gloo)
            self._gloo = None

    def _unlock(self) -> None:
        if self._rank == 0 and not self._lock.closed:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a forked worker has the file, too
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """After an error the other ranks may be gone: what can still become whole gets some
        seconds, and no rank is asked."""
        if kind is None:
            self.close()
        else:
            futures.wait([self._saving] if self._saving else [], GRACE)
            self._unlock()

    def _gather(self, mine: Any) -> list[Any]:
        return [mine] if self._group is None else agree.gather(self._group, mine)

    def _together(self) -> AbstractContextManager[None]:
        """What one rank raises within the block, all ranks raise after it."""
        return nullcontext() if self._group is None else agree.together(self._group)


@contextmanager
def _naming_rank() -> Iterator[None]:
    """Of what torch's checkpoints raise on all ranks, say what happened on the first of them."""
    try:
        yield
    except CheckpointException as error:
        rank = min(error.failures)
        problem, _ = error.failures[rank]
        raise RuntimeError(f"rank {rank}: {problem}") from problem
