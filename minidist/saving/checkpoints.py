"""`save`, `load` and `wait` (lesson: scaling_out)."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from minidist.common import agree
from minidist.common.groups import require_group
from minidist.saving import commit, rank_states
from minidist.saving.box_plan import BoxPlan, describe, read, read_metadata
from minidist.saving.boxes import Boxed
from minidist.saving.whole_states import MODEL, Entries, WholeStates, merged, require_groups
from minidist.saving.writing import Writing

RANK = "rank."
GRACE = 2.0  # seconds that a save has to become whole after an error


class Checkpoints:
    """The checkpoints of one run, in a folder that all ranks see. Lesson: scaling_out.

        with md.saving.Checkpoints("runs/a") as checkpoints:
            step = checkpoints.load(model=model, optimizer=optimizer, data=batches) or 0
            ...
            checkpoints.save(step, model=model, optimizer=optimizer, data=batches)

    A checkpoint has the model, the optimizer, each rank's random numbers, and of what else is
    passed, by name, its `state_dict()`. The model may be bare or in any strategy, on any number of
    ranks. The run that loads may have another strategy and other ranks than the run that saved, and
    compile its model or not. (Where a tensor-parallel layer holds keys and values whole, for it has
    fewer than ranks, it must do so there too; `full_state_dict` loads anywhere.)

    folder: is made if it is missing. A second run in it is refused, by `flock`: on NFS and Lustre
        from another machine, too, unless they are mounted with nolock, local_lock or localflock.
        Where the file system has no locks, a warning says so.
    keep: so many checkpoints stay, and older ones are deleted when a new one is whole.
    process_group: the ranks of the run; None is the default group, or this process alone where
        there is none.

    All ranks call all methods. Raises, on every rank, RuntimeError if another run has the folder,
    or it cannot be written (OSError, where there is no group); ValueError for a `keep` below 1.
    """

    def __init__(
        self, folder: str | Path, keep: int = 2, process_group: dist.ProcessGroup | None = None
    ) -> None:
        self.folder, self.keep = Path(folder), keep
        alone = process_group is None and not (dist.is_available() and dist.is_initialized())
        self._group = None if alone else require_group(process_group, "Checkpoints")
        self._rank = 0 if self._group is None else dist.get_rank(self._group)
        self._lock: commit.Lock | None = None
        self._writing: Writing | None = None
        self._plan: BoxPlan | None = None
        with self._together():
            self._open()

    def _open(self) -> None:
        if not isinstance(self.keep, int) or self.keep < 1:
            raise ValueError(f"keep must be a whole number, 1 or more, not {self.keep}")
        if self._rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = commit.Lock(self.folder)
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
        Python's look at each tensor: of 100 MB in 200 tensors, on 2 ranks, 7 ms and 3 ms, and then
        the ranks agree. The disk gets it from the copy, which stays in memory for the next save. A
        program that ends without `close` waits for it, for 30 seconds at most (a rank of a pool
        for 2), and prints why it is lost, if it is.

        Waits for the save before, if that is still being written. Raises on every rank, and leaves
        nothing but older checkpoints: what `wait` raises; ValueError for a step that is not new, or
        an optimizer that is not the model's; TypeError for a step that is no whole number, or a
        state that no `load` could read.
        """
        self.wait()
        entries: Entries = {}
        partial = problem = None
        try:
            step = commit.whole_number(step)
            entries = self._entries(model, optimizer, others)
            partial = self._begin(step)
        except Exception as error:
            problem = error
        changes = self._plan is None or self._plan.described != describe(entries)
        gathered = self._gather((problem is None, step, changes, partial))
        try:
            if not all(each[0] for each in gathered):
                self._raise_together(problem)
            if any(each[1] != step for each in gathered):
                raise ValueError(
                    f"the ranks save different steps: {[each[1] for each in gathered]}"
                )
            if self._plan is None or any(each[2] for each in gathered):
                self._plan = BoxPlan(entries, self._gather, self._rank)
        except BaseException:
            if partial is not None:
                partial.rmdir()
            raise
        about = {"step": step, "world_size": len(gathered)}
        copies = self._plan.copy(entries)
        self._writing = Writing(gathered[0][3], self._plan, copies, self._rank, about)
        self._writing.start(then=lambda: commit.clear(self.folder, self.keep))

    def _entries(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, others: Mapping[str, Any]
    ) -> Entries:
        states = WholeStates(model, optimizer)
        entries, groups, own = states.entries(), states.groups(), rank_states.states_of(others)
        parts = {name: each for name, each in entries.items() if not isinstance(each, Boxed)}
        parts |= {f"the state of {name}": state for name, state in own.items()}
        rank_states.require_loadable(parts | {"a group of the optimizer": groups})
        record = {"random": rank_states.capture(), "groups": groups, "others": own}
        return entries | {f"{RANK}{self._rank}": record}

    def _begin(self, step: int) -> Path | None:
        if self._rank > 0:
            return None
        newest = max(commit.steps_in(self.folder), default=-1)
        if step <= newest:
            raise ValueError(
                f"{self.folder} has step {newest} already, so step {step} is not new. A run goes "
                "on from there by load(); another run takes another folder"
            )
        return commit.begin(self.folder, step)

    def wait(self) -> None:
        """Until the last save is whole on the disk. Raises RuntimeError on every rank, that names
        rank and folder, if a rank could not write: a full disk, for instance."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.wait_written()
            gathered = self._gather((writing.problem is None, writing.is_whole))
            if not all(each[0] for each in gathered):
                self._raise_together(writing.problem)
            if not gathered[0][1]:  # rank 0 has not seen all files yet
                if self._rank == 0:
                    writing.wait_whole()
                self._raise_together(writing.problem)
        except BaseException:
            writing.abandon()
            raise

    # ---- load ------------------------------------------------------------------------------

    def load(
        self, *, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **others: Any
    ) -> int | None:
        """Load the newest checkpoint, and return its step; None if there is none yet.

        What a killed run has not finished does not count. Every file is read and compared with its
        hash, shared out over the ranks, before anything changes. Raises ValueError on every rank,
        and changes nothing, if a file is missing, cut short or changed, or of a later format, or if
        the checkpoint is of another model or optimizer. (Where a hook takes something else than it
        has saved, parameters are loaded before that is seen.)
        """
        self.wait()
        with self._together():
            own = commit.steps_in(self.folder) if self._rank == 0 else {}
        steps = self._gather(own)[0]
        if not steps:
            return None
        step, folder = max(steps), steps[max(steps)]
        with _telling(folder, steps):
            with self._together():
                states = WholeStates(model, optimizer)
            self._load(step, folder, states, others)
        return step

    def _load(
        self, step: int, folder: Path, states: WholeStates, others: Mapping[str, Any]
    ) -> None:
        ranks, rank = len(self._gather(None)), self._rank

        with self._together():
            manifest = commit.manifest_of(folder)
            if manifest["step"] != step:
                raise ValueError(f"{folder} is of step {manifest['step']}: somebody has renamed it")
            for name, stamp in list(manifest["files"].items())[rank::ranks]:
                commit.require_stamp(folder / name, stamp)
            saved_by = int(manifest["world_size"])
        with self._together():
            metadata = read_metadata(folder)
        ours, names = merged(self._gather(states.groups())), self._gather(states.names())
        with self._together():
            states.require_fitting(metadata)
            _require_no_more(metadata, set().union(*names))
            entries = {f"{RANK}{each}": None for each in range(saved_by)}
            records = list(read(folder, metadata, entries).values())
            groups = merged([record["groups"] for record in records])
            if states.optimizer is not None:
                require_groups(ours, groups)
            own = [record["others"] for record in records]
            found = {name: rank_states.state_for(name, own, rank, ranks) for name in others}
            random = [record["random"] for record in records]
        del records, own  # the states of all ranks
        with self._together():
            states.put(read(folder, metadata, states.rooms(metadata)), groups)
            for name, state in found.items():
                others[name].load_state_dict(state)
            rank_states.restore(random, rank)

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
            return
        if self._writing is not None:
            self._writing.wait_whole(GRACE)
            self._writing.abandon()
            self._writing = None
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # ---- together --------------------------------------------------------------------------

    def _gather(self, mine: Any) -> list[Any]:
        return [mine] if self._group is None else agree.gather(self._group, mine)

    def _together(self) -> AbstractContextManager[None]:
        """What one rank raises within the block, all ranks raise after it."""
        return nullcontext() if self._group is None else agree.together(self._group)

    def _raise_together(self, problem: Exception | None) -> None:
        if self._group is not None:
            agree.raise_on_every_rank(problem, self._group)
        elif problem is not None:
            raise problem


@contextmanager
def _telling(folder: Path, steps: Mapping[int, Path]) -> Iterator[None]:
    """Say of a failed load which checkpoint it was, and what to do."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        before = list(steps.values())[-2:-1]
        onward = f". To go on from {before[0]}, move it away" if before else ""
        raise type(error)(f"{folder} does not load: {error}{onward}") from error


def _require_no_more(saved: Metadata, names: set[str]) -> None:
    more = {name for name in saved.state_dict_metadata if name.startswith(MODEL)} - names
    if more:
        raise ValueError(f"it is of another model: it has {min(more).removeprefix(MODEL)} as well")
