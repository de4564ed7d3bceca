"""A schedule is data: for each rank, the list of what it does in one training step.

The model is cut into stages, and the batch into micro-batches. Stage s lives on rank s modulo the
number of ranks, so the neighbours of a stage are on the neighbouring ranks. Nothing here computes:
the same lists are checked (`validate`, below), timed (`schedules.simulate`), drawn, and run
(`executor`).
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product


@dataclass(frozen=True)
class Instruction:
    """Something that a rank does with one micro-batch in one of its stages."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.stage}, {self.microbatch})"


class Compute(Instruction):
    """What takes a rank's time. The other instructions are messages, which travel meanwhile."""


class Forward(Compute):
    """Outputs from inputs; in the last stage, the loss."""


class Backward(Compute):
    """Gradients for the inputs and for the weights, in one go."""


class BackwardInputs(Compute):
    """Gradients for the inputs alone: all that the stage before waits for."""


class BackwardWeights(Compute):
    """Gradients for the weights alone: nobody waits for them, so they fill idle time."""


class SendActivation(Instruction):
    """The stage's outputs leave for the next stage."""


class ReceiveActivation(Instruction):
    """The stage's inputs may come in, from the stage before."""


class SendGradient(Instruction):
    """The gradient for the stage's inputs leaves for the stage before."""


class ReceiveGradient(Instruction):
    """The gradient for the stage's outputs may come in, from the next stage."""


SENDS = (SendActivation, SendGradient)
RECEIVES = (ReceiveActivation, ReceiveGradient)


@dataclass(frozen=True)
class Schedule:
    """One training step of a pipeline: `ranks[r]` is the list of instructions of rank r."""

    name: str
    stages: int
    microbatches: int
    ranks: list[list[Instruction]] = field(repr=False)

    def rank_of(self, stage: int) -> int:
        """The rank that stage lives on."""
        return stage % len(self.ranks)

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients for inputs and those for weights are computed apart."""
        return any(isinstance(each, BackwardInputs) for own in self.ranks for each in own)


def needs(instruction: Instruction, stages: int) -> Instruction | None:
    """The message that must have been received before a computation, if any."""
    stage, microbatch = instruction.stage, instruction.microbatch
    if isinstance(instruction, Forward) and stage > 0:
        return ReceiveActivation(stage, microbatch)
    if isinstance(instruction, (Backward, BackwardInputs)) and stage < stages - 1:
        return ReceiveGradient(stage, microbatch)
    return None


def gives(instruction: Instruction, stages: int) -> Instruction | None:
    """The message that a computation makes possible, if any."""
    stage, microbatch = instruction.stage, instruction.microbatch
    if isinstance(instruction, Forward) and stage < stages - 1:
        return SendActivation(stage, microbatch)
    if isinstance(instruction, (Backward, BackwardInputs)) and stage > 0:
        return SendGradient(stage, microbatch)
    return None


def other_end(message: Instruction) -> Instruction:
    """The receive of a send, and the send of a receive."""
    stage, microbatch = message.stage, message.microbatch
    match message:
        case SendActivation():
            return ReceiveActivation(stage + 1, microbatch)
        case ReceiveActivation():
            return SendActivation(stage - 1, microbatch)
        case SendGradient():
            return ReceiveGradient(stage - 1, microbatch)
        case ReceiveGradient():
            return SendGradient(stage + 1, microbatch)
    raise TypeError(f"{message} is no message")


@dataclass(frozen=True)
class Span:
    """A piece of a rank's time."""

    instruction: Instruction
    start: float
    end: float


def interpret(schedule: Schedule, do: Callable[[int, Instruction], bool]) -> dict[int, int]:
    """Let all ranks go through their lists, in turns. `do(rank, instruction)` says whether the rank
    could do it, or must wait. Returns at which position each rank that is not at its end waits for
    ever."""
    at = [0] * len(schedule.ranks)
    while waiting := [rank for rank, own in enumerate(schedule.ranks) if at[rank] < len(own)]:
        done = [rank for rank in waiting if do(rank, schedule.ranks[rank][at[rank]])]
        if not done:
            return {rank: at[rank] for rank in waiting}
        for rank in done:
            at[rank] += 1
    return {}


def kept(instructions: Sequence[Instruction]) -> list[int]:
    """After each instruction of a rank, of how many forward passes it keeps the activations: until
    the gradients for the weights are there."""
    now, counts = 0, []
    for instruction in instructions:
        now += isinstance(instruction, Forward)
        now -= isinstance(instruction, (Backward, BackwardWeights))
        counts.append(now)
    return counts


# ---- can ranks run it? -------------------------------------------------------------------------


class ScheduleError(ValueError):
    """A schedule that ranks cannot run. Names the rank, the position in its list, and what is
    there."""


def validate(schedule: Schedule) -> None:
    """Raise ScheduleError unless the schedule trains every stage on every micro-batch.
    Lesson: pipeline_schedules

    - Each rank does what its stages have to do, each once: a forward, and a backward in one part
      or in two, with the messages that they need and make possible.
    - Forward comes before backward, gradients for inputs before those for weights, a receive
      before what needs it, a send after what makes it.
    - Between any two ranks messages are received in the order in which they are sent.
    - No ranks wait for each other for ever, whether a send waits for its receive or not.
    """
    for rank in range(len(schedule.ranks)):
        _complete_and_in_order(schedule, rank)
    _matched(schedule)
    for buffered in (True, False):
        _ends(schedule, buffered)


def _error(schedule: Schedule, rank: int, position: int, problem: str) -> ScheduleError:
    return ScheduleError(
        f"{schedule.name}, rank {rank}, position {position}, "
        f"{schedule.ranks[rank][position]}: {problem}"
    )


def _complete_and_in_order(schedule: Schedule, rank: int) -> None:
    """Each rank does what its stages have to do, each once, and after what it depends on."""
    instructions, stages = schedule.ranks[rank], schedule.stages
    own = range(rank, stages, len(schedule.ranks))
    if not own:
        raise ScheduleError(f"{schedule.name}, rank {rank}: has no stage, for there are {stages}")
    halves = {x for x in instructions if isinstance(x, (BackwardInputs, BackwardWeights))}
    in_two_parts = {(x.stage, x.microbatch) for x in halves}
    before: dict[Instruction, list[Instruction]] = {}  # each, and what must stand before it
    for place in product(own, range(schedule.microbatches)):
        kinds = [BackwardInputs, BackwardWeights] if place in in_two_parts else [Backward]
        previous = None
        for step in [Forward(*place), *(kind(*place) for kind in kinds)]:
            needed, given = needs(step, stages), gives(step, stages)
            before[step] = [x for x in (needed, previous) if x]
            before |= ({needed: []} if needed else {}) | ({given: [step]} if given else {})
            previous = step
    places: dict[Instruction, int] = {}
    for position, instruction in enumerate(instructions):
        if not isinstance(instruction, Instruction):
            raise _error(schedule, rank, position, "is no Instruction")
        if instruction.stage not in own:
            raise _error(schedule, rank, position, "the stage is not on this rank")
        if instruction.microbatch not in range(schedule.microbatches):
            raise _error(schedule, rank, position, "there is no such micro-batch")
        if instruction in places:
            raise _error(schedule, rank, position, f"stands at {places[instruction]} already")
        places[instruction] = position
    for instruction in sorted(before.keys() - places.keys(), key=str):
        raise ScheduleError(f"{schedule.name}, rank {rank}: {instruction} is missing")
    for instruction, position in places.items():
        if instruction not in before:
            raise _error(schedule, rank, position, "has no use here")
        for other in before[instruction]:
            if places[other] > position:
                raise _error(schedule, rank, position, f"stands before {other}")


def _matched(schedule: Schedule) -> None:
    """The n-th send from one rank to another is what that rank receives as the n-th from it."""
    receives: dict[tuple[int, int], deque[tuple[int, Instruction]]] = defaultdict(deque)
    for rank, instructions in enumerate(schedule.ranks):
        for position, instruction in enumerate(instructions):
            if isinstance(instruction, RECEIVES):
                sender = schedule.rank_of(other_end(instruction).stage)
                receives[sender, rank].append((position, instruction))
    for rank, instructions in enumerate(schedule.ranks):
        for wanted in [other_end(each) for each in instructions if isinstance(each, SENDS)]:
            there = schedule.rank_of(wanted.stage)
            position, receive = receives[rank, there].popleft()  # as many: the lists are complete
            if receive != wanted:
                problem = f"rank {rank} sends what {wanted} is for first"
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
