"""Five schedules. Each is a pure function from numbers to lists of instructions.

With p ranks, m micro-batches and v stages a rank, where backward takes twice as long as forward:

                  idle, of the ideal time   activations kept on rank r
    naive         p - 1                     1
    gpipe         (p-1) / m                 m
    1f1b          (p-1) / m                 min(m, p-r)
    interleaved   (p-1) / (v m)             of v times smaller stages: up to 2(p-r-1) + (v-1)p + 1
    zero_bubble   (p-1) / (3 m), if m ≥ p   min(m, p)
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache

from minidist.pipeline.instructions import (
    Backward,
    BackwardInputs,
    BackwardWeights,
    Compute,
    Forward,
    Instruction,
    Schedule,
    gives,
    other_end,
)
from minidist.pipeline.simulate import simulate, validate

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
    2401.10241). Rank r puts off those of r micro-batches, and so every rank keeps the activations
    of min(m, p), no more than the first rank of 1F1B.

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
