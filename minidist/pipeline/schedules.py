"""Five schedules, and what can be known of one before it runs. Each is a pure function from numbers
to lists of instructions; `simulate` says when each rank would do what, if computations took so long
and messages went over such a link.

With p ranks, m micro-batches and v stages a rank, where backward takes twice as long as forward:

                  idle, of the ideal time   micro-batches kept on rank r
    naive         p - 1                     1
    gpipe         (p-1) / m                 m
    1f1b          (p-1) / m                 min(m, p-r)
    interleaved   (p-1) / (v m)             of v times smaller stages: up to 2(p-r-1) + (v-1)p + 1
    zero_bubble   (p-1) / (3 m), if m ≥ p   min(m, p), up to r of them with their gradients
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from minidist.instruments.link.lines import Lines
from minidist.instruments.link.link import Link, Network
from minidist.pipeline.instructions import (
    Backward,
    BackwardInputs,
    BackwardWeights,
    Compute,
    Forward,
    Instruction,
    Schedule,
    Span,
    gives,
    interpret,
    kept,
    needs,
    other_end,
    validate,
)

Order = list[Compute]  # what one rank computes, without messages


def naive(ranks: int, microbatches: int) -> Schedule:
    """One micro-batch at a time, so one rank at a time.

    Lesson: layer_splitting
    """

    def order(rank: int) -> Order:
        return [step(rank, i) for i in range(microbatches) for step in (Forward, Backward)]

    return with_messages("naive", map(order, range(ranks)), ranks, microbatches)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forward passes, then all backward passes (Huang et al., arXiv 1811.06965).

    Lesson: layer_splitting
    """

    def order(rank: int) -> Order:
        return [step(rank, i) for step in (Forward, Backward) for i in range(microbatches)]

    return with_messages("gpipe", map(order, range(ranks)), ranks, microbatches)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """As few forward passes as fill the pipeline, then one forward, one backward in turns
    (PipeDream-Flush: Narayanan et al., arXiv 2006.09503). Idle as long as GPipe, it keeps fewer
    activations: those of min(m, p-r) micro-batches on rank r.

    Lesson: layer_splitting
    """

    def order(rank: int) -> Order:
        forwards = [Forward(rank, i) for i in range(microbatches)]
        backwards = [Backward(rank, i) for i in range(microbatches)]
        return in_turns(forwards, backwards, warmup=ranks - rank - 1)

    return with_messages("1f1b", map(order, range(ranks)), ranks, microbatches)


def interleaved(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """1F1B with several smaller stages on each rank: the pipeline fills v times as fast, for v
    times as many messages (Narayanan et al., arXiv 2104.04473).
    Lesson: pipeline_schedules

    Micro-batches go in groups of p through a rank's first stage, then through its second, …
    Raises ValueError unless there are 2 ranks or more, and `microbatches` is a multiple of them.
    """
    if ranks < 2:
        raise ValueError("the interleaved schedule needs 2 ranks or more: one has no neighbour")
    if microbatches % ranks:
        raise ValueError(
            f"the interleaved schedule takes micro-batches in groups of {ranks}, one for each "
            f"rank: {microbatches} is not a multiple"
        )
    stages = ranks * stages_per_rank

    def places(turns: Sequence[int], rank: int) -> Iterator[tuple[int, int]]:
        for group in range(0, microbatches, ranks):
            for turn in turns:
                for i in range(group, group + ranks):
                    yield turn * ranks + rank, i

    def order(rank: int) -> Order:
        turns = range(stages_per_rank)
        forwards = [Forward(*place) for place in places(turns, rank)]
        backwards = [Backward(*place) for place in places(turns[::-1], rank)]
        warmup = 2 * (ranks - rank - 1) + (stages_per_rank - 1) * ranks
        return in_turns(forwards, backwards, warmup)

    return with_messages("interleaved", map(order, range(ranks)), stages, microbatches)


def zero_bubble(ranks: int, microbatches: int) -> Schedule:
    """1F1B with the gradients for weights put off into what was idle time: ZB-H1 (Qi et al., arXiv
    2401.10241). Rank r puts off those of r micro-batches, and so every rank keeps min(m, p), as
    the first rank of 1F1B does. Those put off keep the gradients of their layers' outputs, too.

    Lesson: pipeline_schedules
    """

    def order(rank: int) -> Order:
        done: Order = []
        for step in in_turns(
            [Forward(rank, i) for i in range(microbatches)],
            [BackwardInputs(rank, i) for i in range(microbatches)],
            warmup=ranks - rank - 1,
        ):
            done.append(step)
            if isinstance(step, BackwardInputs) and step.microbatch >= rank:
                done.append(BackwardWeights(rank, step.microbatch - rank))
        late = range(max(0, microbatches - rank), microbatches)
        return done + [BackwardWeights(rank, i) for i in late]

    return with_messages("zero_bubble", map(order, range(ranks)), ranks, microbatches)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
}


def find(what: str | Schedule, ranks: int, microbatches: int, stages: int) -> Schedule:
    """The schedule of that name, or the one that was given. `stages`: for "interleaved". Raises
    ValueError for one that does not exist, is for others, or cannot be run."""
    if isinstance(what, Schedule):
        found = len(what.ranks), what.microbatches
        if found != (ranks, microbatches):
            raise ValueError(
                f"the schedule is for {found[0]} ranks and {found[1]} micro-batches, "
                f"not {ranks} and {microbatches}"
            )
        validate(what)
        return what
    if what == "interleaved":
        return interleaved(ranks, microbatches, max(1, stages // ranks))
    if what in SCHEDULES:
        return SCHEDULES[what](ranks, microbatches)
    raise ValueError(f"there is no schedule {what!r}; there are {', '.join(SCHEDULES)}")


@cache
def forward_only(ranks: int, stages: int, microbatches: int) -> Schedule:
    """Forward passes alone, for evaluation."""
    orders: list[Order] = [
        [Forward(stage, i) for stage in range(rank, stages, ranks) for i in range(microbatches)]
        for rank in range(ranks)
    ]
    return with_messages("forward_only", orders, stages, microbatches)


def in_turns(first: Sequence[Compute], second: Sequence[Compute], warmup: int) -> Order:
    """`warmup` of the first ones, then one of each in turns, then what is left of the second."""
    warmup = min(warmup, len(first))
    done = list(first[:warmup])
    for one, other in zip(first[warmup:], second, strict=False):
        done += [one, other]
    return done + list(second[len(first) - warmup :])


def with_messages(
    name: str, orders: "Iterator[Order] | Sequence[Order]", stages: int, microbatches: int
) -> Schedule:
    """Add the sends and receives that computations in these orders, one for each rank, need.

    The step is simulated. Computations are written down in the order in which they end there: each
    in its rank's list, then its send, and at once the receive in the other rank's. Ranks that go
    through their lists in this order never wait for ever, even if each stops at each message until
    its other end is reached. And a receive stands before the computation during which its message
    comes.
    """
    bare = Schedule(name, stages, microbatches, [list(order) for order in orders])
    spans = enumerate(simulate(bare).spans)
    ends = [(span.end, rank, span.instruction) for rank, own in spans for span in own]
    ranks: list[list[Instruction]] = [[] for _ in bare.ranks]
    for _, rank, instruction in sorted(ends, key=lambda end: end[:2]):
        ranks[rank].append(instruction)
        if send := gives(instruction, stages):
            receive = other_end(send)
            ranks[rank].append(send)
            ranks[bare.rank_of(receive.stage)].append(receive)
    return Schedule(name, stages, microbatches, ranks)


# ---- what can be known of one before it runs ---------------------------------------------------

Time = float | Sequence[float]  # of every stage, or of each


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

    parts: dict[type[Instruction], list[Time]] = {
        Forward: [forward],
        Backward: [backward_inputs, backward_weights],
        BackwardInputs: [backward_inputs],
        BackwardWeights: [backward_weights],
    }

    def duration(instruction: Instruction) -> float:
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
