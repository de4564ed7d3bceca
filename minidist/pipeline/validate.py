"""Is a schedule one that ranks can run? Found out from the lists alone."""

from collections import defaultdict
from collections.abc import Sequence

from minidist.pipeline.instructions import (
    RECEIVES,
    SENDS,
    Backward,
    BackwardInputs,
    BackwardWeights,
    Compute,
    Forward,
    Instruction,
    Schedule,
    gives,
    needs,
    other_end,
)
from minidist.pipeline.simulate import interpret, kept


class ScheduleError(ValueError):
    """A schedule that ranks cannot run. Names the rank, the position in its list, and what is
    there."""


def validate(schedule: Schedule, in_flight: Sequence[int] | None = None) -> None:
    """Raise ScheduleError unless the schedule trains every stage on every micro-batch.
    Lesson: pipeline_schedules

    - Each rank does what its stages have to do, each once: a forward, and a backward in one part
      or in two, with the messages that they need and make possible.
    - Forward comes before backward, gradients for inputs before those for weights, a receive
      before what needs it, a send after what makes it.
    - Between any two ranks messages are received in the order in which they are sent.
    - No ranks wait for each other for ever, whether a send waits for its receive or not.
    - in_flight: rank r never keeps the activations of more than in_flight[r] forward passes.
    """
    for rank in range(len(schedule.ranks)):
        _complete(schedule, rank)
        _in_order(schedule, rank)
    _matched(schedule)
    for buffered in (True, False):
        _ends(schedule, buffered)
    for rank, limit in enumerate(in_flight or ()):
        for position, count in enumerate(kept(schedule.ranks[rank])):
            if count > limit:
                raise _error(schedule, rank, position, f"keeps {count} activations, not {limit}")


def _error(schedule: Schedule, rank: int, position: int, problem: str) -> ScheduleError:
    return ScheduleError(
        f"{schedule.name}, rank {rank}, position {position}, "
        f"{schedule.ranks[rank][position]}: {problem}"
    )


def _complete(schedule: Schedule, rank: int) -> None:
    """Each rank does what its stages have to do, each once."""
    instructions, stages = schedule.ranks[rank], schedule.stages
    own = range(rank, stages, len(schedule.ranks))
    places: dict[Instruction, int] = {}
    for position, instruction in enumerate(instructions):
        if instruction.stage not in own:
            raise _error(schedule, rank, position, "the stage is not on this rank")
        if instruction.microbatch not in range(schedule.microbatches):
            raise _error(schedule, rank, position, "there is no such micro-batch")
        if instruction in places:
            raise _error(schedule, rank, position, f"stands at {places[instruction]} already")
        places[instruction] = position
    wanted: set[Instruction] = set()
    for stage in own:
        for i in range(schedule.microbatches):
            split = BackwardInputs(stage, i) in places or BackwardWeights(stage, i) in places
            parts = (BackwardInputs, BackwardWeights) if split else (Backward,)
            for step in [Forward(stage, i), *(part(stage, i) for part in parts)]:
                messages = needs(step, stages), gives(step, stages)
                wanted |= {step, *(message for message in messages if message)}
    for instruction in sorted(wanted - places.keys(), key=str):
        raise ScheduleError(f"{schedule.name}, rank {rank}: {instruction} is missing")
    for instruction, position in places.items():
        if instruction not in wanted:
            raise _error(schedule, rank, position, "has no use here")


def _in_order(schedule: Schedule, rank: int) -> None:
    """What depends on something in the same list comes after it."""
    instructions, stages = schedule.ranks[rank], schedule.stages
    makers = {gives(instruction, stages): instruction for instruction in instructions}
    done: set[Instruction] = set()
    for position, instruction in enumerate(instructions):
        place = instruction.stage, instruction.microbatch
        before = [needs(instruction, stages), makers.get(instruction)]
        if isinstance(instruction, (Backward, BackwardInputs)):
            before.append(Forward(*place))
        if isinstance(instruction, BackwardWeights):
            before.append(BackwardInputs(*place))
        for other in before:
            if other is not None and other not in done:
                raise _error(schedule, rank, position, f"stands before {other}")
        done.add(instruction)


def _matched(schedule: Schedule) -> None:
    """The n-th send from one rank to another is what that rank receives as the n-th from it."""
    sends: dict[tuple[int, int], list[tuple[int, Instruction]]] = defaultdict(list)
    receives: dict[tuple[int, int], list[tuple[int, Instruction]]] = defaultdict(list)
    for rank, instructions in enumerate(schedule.ranks):
        for position, instruction in enumerate(instructions):
            if isinstance(instruction, Compute):
                continue
            there = schedule.rank_of(other_end(instruction).stage)
            if isinstance(instruction, SENDS):
                sends[rank, there].append((position, other_end(instruction)))
            else:
                receives[there, rank].append((position, instruction))
    for (here, there), sent in sends.items():
        pairs = zip(sent, receives[here, there], strict=True)  # as many: the lists are complete
        for (_, wanted), (position, receive) in pairs:
            if receive != wanted:
                problem = f"rank {here} sends what {wanted} is for first"
                raise _error(schedule, there, position, problem)


def _ends(schedule: Schedule, buffered: bool) -> None:
    """Go through all lists, as far as the messages let each rank go."""
    reached: set[Instruction] = set()  # messages that a rank has come to

    def do(rank: int, instruction: Instruction) -> bool:
        reached.add(instruction)
        waits = isinstance(instruction, RECEIVES if buffered else SENDS + RECEIVES)
        return not waits or other_end(instruction) in reached

    if stuck := interpret(schedule, do):
        where = ", ".join(
            f"rank {rank} at {schedule.ranks[rank][at]}" for rank, at in stuck.items()
        )
        rank, how = next(iter(stuck)), "buffered" if buffered else "blocking"
        raise _error(schedule, rank, stuck[rank], f"deadlock with {how} sends: {where}")
