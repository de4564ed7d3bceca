"""`python -m minidist doctor script.py`: does it train on N ranks as it would in one process?

The script runs as it is, on N ranks, for a few steps. Then one process runs it, and takes each step
from the ranks' weights and with all their batches. What parts first is said in one sentence, with
its cause, from a least-squares fit of the gradient on that of each rank's own batch.

To read: `consult` below, then `witness` (inside the script's processes), `feed`, `verdict`.

Limits: dropout drops nothing while the doctor looks, and batch norm takes its means by rank in one
process as well; torch.compile does not compile. Buffers are not compared, nor are ranks that have
other layers than one process. The script writes its files as ever. If it makes its batches without
a DataLoader, targets are known of torch's losses only.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from minidist.doctor import verdict
from minidist.doctor.runs import Process, Runs
from minidist.doctor.witness import Job

YES, NO, UNKNOWN = 0, 1, 2


def add(sub: argparse.ArgumentParser) -> None:
    """The options."""
    sub.description = """Does a training script train on N ranks as it would in one process? Says
so in a sentence. Exit code 0: it does, 1: it does not, 2: the doctor cannot say."""
    sub.add_argument("--world-size", type=int, default=2, help="how many ranks (2)")
    sub.add_argument("--steps", type=int, default=3, help="how many steps are looked at (3)")
    sub.add_argument(
        "--tolerance", type=float, help="by which part of a step weights may differ (by dtype)"
    )
    sub.add_argument("--seconds", type=float, default=120, help="the longest for one run (120)")
    sub.add_argument("--cuda", action="store_true", help="let it see the GPUs")
    sub.add_argument("script", type=Path)
    sub.add_argument("words", nargs=argparse.REMAINDER, help="the script's own arguments")

    def begin(given: argparse.Namespace) -> None:
        if not given.script.is_file():
            sub.error(f"{given.script}: no such file")
        if given.world_size < 2 or given.steps < 1:
            sub.error("--world-size must be 2 or more, --steps 1 or more")
        words = [str(given.script), *given.words]
        with TemporaryDirectory() as folder:
            runs = Runs(Path(folder), words, given.steps, given.seconds, given.cuda)
            code, said = consult(runs, given.world_size, given.tolerance)
        print(said)
        sys.exit(code)

    sub.set_defaults(run=begin)


def consult(runs: Runs, world_size: int, tolerance: float | None = None) -> tuple[int, str]:
    """The exit code, and the sentence."""
    ranks = runs.ranks(world_size)
    count = min(len(rank.steps) for rank in ranks)
    fast = max(ranks, key=lambda rank: len(rank.steps))
    for slow in ranks:  # one that goes on without a step, until it waits for the others
        if len(slow.steps) < len(fast.steps) and slow.forwards > fast.forwards:
            took = f"{slow.who} takes {len(slow.steps)} of them in {slow.forwards} forward passes"
            return NO, f"{fast.who} takes {len(fast.steps)} steps of the optimizer, and {took}."
    steps = [[rank.steps[s] for rank in ranks] for s in range(count)]
    if not count:
        return UNKNOWN, _no_step(ranks, world_size)
    if not any(step["group"] for step in steps[0]):
        return UNKNOWN, "Each rank trains alone: the script makes no process group."
    if any(step["unknown"] for step in steps[0]):
        return UNKNOWN, "The doctor does not know FSDP1's shards; it knows those of fully_shard."
    for number, step in enumerate(steps, start=1):
        if words := verdict.among_ranks(step, number):
            return NO, f"Step {number}: {words}."
    if bad := next((rank for rank in ranks if rank.code), None):
        return UNKNOWN, f"It fails on {world_size} ranks:\n{bad.said}"
    fed = [f"rank{rank}" for rank in verdict.sources(steps[0])]
    for number, step in enumerate(steps, start=1):
        torch.save(verdict.whole(step, "before")[0], runs.folder / f"begin.{number}")
    one, words = _one(runs, fed, ranks)
    if one is None:
        return UNKNOWN, words
    for number, (step, own) in enumerate(zip(steps, one.steps, strict=False), start=1):
        if {name for each in step for name in each["after"]} != own["after"].keys():
            return UNKNOWN, "The ranks have other parameters than one process."
        parted, kind, by = verdict.beside(step, own, tolerance)
        if parted and own["random"]:
            return UNKNOWN, "The model draws random numbers, which are others in one process."
        if parted:
            jobs = [Job(str(runs.folder), f"solo{who}", number, [who]) for who in fed]
            solos = runs.alone(jobs)
            last = [solo.steps[-1] for solo in solos if len(solo.steps) == number]
            why = verdict.cause(step, own, parted, last if len(last) == len(fed) else [])
            first = (
                f"the {kind} of {verdict.names(parted)} is {verdict.percent(by)} off one process's"
            )
            return NO, f"Step {number}: {first}; {why}"
    return YES, f"On {world_size} ranks it trains as in one process, for {len(one.steps)} steps."


def _no_step(ranks: Sequence[Process], world_size: int) -> str:
    if bad := next((rank for rank in ranks if rank.code), None):
        return f"It fails on {world_size} ranks:\n{bad.said}"
    late = next(rank for rank in ranks if not rank.steps)
    if late.code is None:
        return f"{late.who} came to no step of an optimizer in the time: --seconds gives more."
    return "The script ends without a step of one of torch's optimizers after a forward pass."


def _one(runs: Runs, fed: list[str], ranks: Sequence[Process]) -> tuple[Process | None, str]:
    """One process that trains on all that the ranks had; or words why there is none. It takes their
    batches joined, or in turns if it has so many more micro-batches."""
    for apart in (False, True):
        one = runs.alone([Job(str(runs.folder), f"one{apart}", runs.steps, fed, apart)])[0]
        if one.code:
            return None, f"It fails in one process, with the ranks' batches:\n{one.said}"
        theirs = [step["forwards"] for step in ranks[0].steps]
        own = [step["forwards"] for step in one.steps]
        if own and own[0] == theirs[0] * (len(fed) if apart else 1):
            return one, ""
    return (
        None,
        "One process has another number of micro-batches in a step than the ranks together.",
    )
