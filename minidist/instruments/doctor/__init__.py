"""`python -m minidist doctor script.py`: does it train on N ranks as it would in one process?

The script runs as it is, on N ranks, for a few steps. Then one process runs it, and takes each step
from the ranks' weights and with all their batches. What parts first is said in one sentence, with
its cause, from a least-squares fit of the gradient on that of each rank's own batch.

To read: `consult` below, then `witness` (inside the script's processes), `feed`, `verdict`.

Limits: ranks start as under torchrun. Dropout drops nothing while the doctor looks, and batch norm
takes its means by rank in one process as well; torch.compile does not compile. Of buffers those of
batch norm alone are compared, among ranks; ranks that have other layers than one process are not.
Where no DataLoader gives a batch for each forward pass, targets are known of torch's losses only.
Examples come first in every tensor. A missing sampler is seen if ranks draw the same order, a
missing set_epoch is not. The script writes its files as ever.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from minidist.instruments.doctor import verdict
from minidist.instruments.doctor.runs import Process, Runs
from minidist.instruments.doctor.verdict import UnclearError, percent
from minidist.instruments.doctor.witness import Job

YES, NO, UNKNOWN = 0, 1, 2
MORE = "--seconds gives more time"


def add(sub: argparse.ArgumentParser) -> None:
    """The options."""
    sub.description = """Does a training script train on N ranks as it would in one process? Says
so in a sentence. Exit code 0: it does, 1: it does not, 2: the doctor cannot say."""
    sub.add_argument("--world-size", type=int, default=2, help="how many ranks (2)")
    sub.add_argument("--steps", type=int, default=3, help="how many steps are looked at (3)")
    sub.add_argument("--seconds", type=float, default=120, help="the longest for one run (120)")
    sub.add_argument("script", type=Path)
    sub.add_argument("words", nargs=argparse.REMAINDER, help="the script's own arguments")

    def begin(given: argparse.Namespace) -> None:
        if not given.script.is_file():
            sub.error(f"{given.script}: no such file")
        if given.world_size < 2 or given.steps < 1:
            sub.error("--world-size must be 2 or more, --steps 1 or more")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its processes end with it
        words = [str(given.script), *given.words]
        with TemporaryDirectory() as folder:
            runs = Runs(Path(folder), words, given.steps, given.seconds)
            code, said = consult(runs, given.world_size)
        print(said)
        sys.exit(code)

    sub.set_defaults(run=begin)


def consult(runs: Runs, world_size: int) -> tuple[int, str]:
    """The exit code, and the sentence."""
    ranks = runs.ranks(world_size)
    fast = max(ranks, key=lambda rank: len(rank.steps))
    for slow in ranks:  # one that goes on without a step, until it waits for the others
        if len(slow.steps) < len(fast.steps) and slow.forwards > fast.forwards:
            took = f"{slow.who} takes {len(slow.steps)} of them in {slow.forwards} forward passes"
            return NO, f"{fast.who} takes {len(fast.steps)} steps of the optimizer, and {took}."
    steps = [list(of) for of in zip(*(rank.steps for rank in ranks), strict=False)]
    try:
        _require_steps(ranks, steps)
        for number, step in enumerate(steps, start=1):
            if words := verdict.among_ranks(step, steps[-1], number):
                return NO, f"Step {number}: {words}."
        _require_no_error(ranks, f"on {world_size} ranks")
        fed = [f"rank{rank}" for rank in verdict.sources(steps[0])]
        for number, step in enumerate(steps, start=1):
            torch.save(verdict.joined(step, "before")[0], runs.folder / f"begin.{number}")
        alone = _alone(runs, fed, steps[0][0]["forwards"])
        for number, (step, one) in enumerate(zip(steps, alone, strict=False), start=1):
            if words := _parted(runs, step, one, number, fed):
                return NO, f"Step {number}: {words}"
    except UnclearError as error:
        return UNKNOWN, str(error)
    return YES, f"On {world_size} ranks it trains as in one process, for {len(alone)} steps."


def _require_no_error(of: Sequence[Process], where: str) -> None:
    for process in of:
        if process.code:
            raise UnclearError(f"It fails {where}:\n{process.said}")


def _require_steps(ranks: Sequence[Process], steps: list[list[verdict.Step]]) -> None:
    if not steps:
        _require_no_error(ranks, f"on {len(ranks)} ranks")
        late = next(rank for rank in ranks if not rank.steps)
        if late.code is None:
            raise UnclearError(f"{late.who} came to no step of an optimizer: {MORE}.")
        raise UnclearError(
            "It ends without a step of one of torch's optimizers after a forward pass."
        )
    if not any(step["group"] for step in steps[0]):
        raise UnclearError("Each rank trains alone: the script makes no process group.")
    if any(step["unknown"] for step in steps[0]):
        raise UnclearError(
            "The doctor does not know FSDP1's shards; it knows those of fully_shard."
        )


def _alone(runs: Runs, fed: list[str], forwards: int) -> list[verdict.Step]:
    """The steps of one process that trains on all that the ranks had. It takes their batches
    joined, or in turns if it has so many more micro-batches. forwards: of a rank's step."""
    for apart in (False, True):
        job = Job(str(runs.folder), f"one{apart}", runs.steps, fed, apart)
        one = runs.alone([job])
        _require_no_error(one, "in one process, with the ranks' batches")
        if one[0].code is None and not one[0].steps:
            raise UnclearError(f"One process came to no step: {MORE}.")
        if one[0].steps and one[0].steps[0]["forwards"] == forwards * (len(fed) if apart else 1):
            return one[0].steps
    raise UnclearError("One process has another number of micro-batches in a step than all ranks.")


def _parted(
    runs: Runs, step: list[verdict.Step], one: verdict.Step, number: int, fed: list[str]
) -> str:
    """What parts in a step, and why; nothing if nothing does."""
    theirs, alone = ({key[0] for each in of for key in each["after"]} for of in (step, [one]))
    if theirs != alone:
        raise UnclearError("The ranks have other parameters than one process.")
    parted, kind, by = verdict.beside(step, one)
    if not parted:
        return ""
    rows = [row for who in fed for row in step[int(who.removeprefix("rank"))]["rows"]]
    if sorted(rows) != sorted(one["rows"]):
        raise UnclearError(
            "One process computes with other inputs: the loop draws random numbers itself, or "
            "examples are not the first dimension."
        )
    if one["random"]:
        raise UnclearError("The model draws random numbers, which are others in one process.")
    solos = runs.alone([Job(str(runs.folder), f"solo{who}", number, [who]) for who in fed])
    last = [solo.steps[-1] for solo in solos if len(solo.steps) == number]
    why = verdict.cause(step, one, parted, last if len(last) == len(fed) else [])
    by_how_much = f"the {kind} of {verdict.names(parted)} is {percent(by)} off"
    return f"{by_how_much} one process's; {why}"
