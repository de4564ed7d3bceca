"""What can be known of a schedule from its lists alone.

`simulate`: when each rank would do what, if computations took so long and messages went over such a
link. `validate`: whether ranks can run it at all.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from minidist.link.lines import Lines
from minidist.link.link import Link, Network
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

Time = float | Sequence[float]  # of every stage, or of each


@dataclass(frozen=True)
class Span:
    """A piece of a rank's time."""

    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True)
class Prediction:
    """spans: for each rank, when it computes what. in_flight: for each rank, the most forward
    passes whose backward pass it still owes, that is, the activations it has to keep."""

    spans: list[list[Span]]
    in_flight: list[int]

    @property
    def time(self) -> float:
        """Of the whole step."""
        return max((rank[-1].end for rank in self.spans if rank), default=0.0)

    @property
    def idle(self) -> float:
        """The part of all ranks' time in which they compute nothing: the bubble, as a fraction of
        the total time. GPipe and 1F1B: (p-1)/(m+p-1), for p ranks and m micro-batches."""
        busy = sum(span.end - span.start for rank in self.spans for span in rank)
        return 1 - busy / (self.time * len(self.spans)) if busy else 0.0


def simulate(
    schedule: Schedule,
    forward: Time = 1.0,
    backward_inputs: Time = 1.0,
    backward_weights: Time = 1.0,
    link: Link | None = None,
    nbytes: float = 0.0,
    nodes: int = 1,
) -> Prediction:
    """Predict a training step.
    Lesson: pipeline_schedules

    forward, backward_inputs, backward_weights: of one micro-batch, in any unit of time; a number
        for every stage, or one for each. A whole backward takes as long as both its parts.
    link: over which a rank sends messages while it goes on computing; then the unit is a second. It
        is that of `md.ranks`, with the same lines: one between two ranks of a node, each way, and a
        cable for all ranks of a node to those of others.
    nbytes: of a message, an activation or a gradient of a micro-batch.
    nodes: over which the ranks are spread.

    Raises ValueError, with what each rank waits for, if they all wait for ever.
    """
    ranks = schedule.ranks
    clock = [0.0] * len(ranks)
    node_of = [rank * nodes // len(ranks) for rank in range(len(ranks))]
    network = Network(link, range(len(ranks)), node_of, Lines()) if link is not None else None
    spans: list[list[Span]] = [[] for _ in ranks]
    arrival: dict[Instruction, float] = {}

    def duration(instruction: Instruction) -> float:
        parts: dict[type[Instruction], list[Time]] = {
            Forward: [forward],
            Backward: [backward_inputs, backward_weights],
            BackwardInputs: [backward_inputs],
            BackwardWeights: [backward_weights],
        }
        own, stage = parts[type(instruction)], instruction.stage
        return sum(part if isinstance(part, (int, float)) else part[stage] for part in own)

    def do(rank: int, instruction: Instruction) -> bool:
        """A computation, if what it needs has been sent."""
        needed = needs(instruction, schedule.stages)
        if needed is not None and needed not in arrival:
            return False
        if isinstance(instruction, Compute):
            start = max(clock[rank], arrival[needed] if needed else 0.0)
            clock[rank] = start + duration(instruction)
            spans[rank].append(Span(instruction, start, clock[rank]))
            if message := gives(instruction, schedule.stages):
                receive = other_end(message)
                to = schedule.rank_of(receive.stage)
                trip = network.send(rank, to, nbytes, clock[rank]) if network else None
                arrival[receive] = trip.due if trip else clock[rank]
        return True

    if stuck := interpret(schedule, do):
        where = "; ".join(f"rank {rank} at {ranks[rank][at]}" for rank, at in stuck.items())
        raise ValueError(f"{schedule.name}: the ranks wait for each other: {where}")
    return Prediction(spans, [max(kept(rank), default=0) for rank in ranks])


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
        _complete_and_in_order(schedule, rank)
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


def _complete_and_in_order(schedule: Schedule, rank: int) -> None:
    """Each rank does what its stages have to do, each once, and after what it depends on."""
    instructions, stages = schedule.ranks[rank], schedule.stages
    own = range(rank, stages, len(schedule.ranks))
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
