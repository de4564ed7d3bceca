"""The messages of a step, one by one: what `step_time` adds up. Lessons: scaling_out, experts"""

from collections.abc import Iterator
from typing import NamedTuple

from minidist.instruments.planner.layout import Layout, Stage, stages
from minidist.instruments.planner.model_states import PRECISIONS, STAGES, require_one_of
from minidist.instruments.planner.transformer import Transformer


class Planned(NamedTuple):
    """So many `times`, a collective or a message among `ranks`: `nbytes` of the whole vector, n in
    `md.collectives.cost`."""

    operation: str
    nbytes: int
    ranks: int
    times: int


def messages(
    model: Transformer, layout: Layout, precision: str = "mixed", number: int = 0
) -> list[Planned]:
    """What a rank of pipeline stage `number` begins in a step, with nothing recomputed.
    Lesson: scaling_out.

    Along tensor, what `step_time` leaves out is here too: the embedding, the head, the loss; and
    with `sequence_parallel` the gradients of norms, and that backward gathers the inputs of columns
    again (arXiv 2205.05198, section 4.2.2). Along pipeline each rank sends whole activations; in
    `step_time` a tensor rank sends its part, as in Megatron. Along data, stages 0 to 2 have one
    message, however many buckets carry it.

    Raises ValueError for another layout, for a stage that is not there, and as `peak` does.
    """
    require_one_of("precision", precision, PRECISIONS)
    require_one_of("stage", layout.stage, (0, 1) if model.experts else STAGES)
    plain = ["recompute", "chunks", "context", "replicate", "reshard_after_forward", "once"]
    for name in plain + ["tensor"] * bool(model.experts):
        require_one_of(name, getattr(layout, name), (getattr(Layout(), name),))
    held = stages(model, layout)
    require_one_of("number", number, range(len(held)))
    planned = _all(model, layout, precision, held[number])
    return [each for each in planned if each.ranks > 1 and each.times]


def _all(model: Transformer, layout: Layout, precision: str, own: Stage) -> Iterator[Planned]:
    size = PRECISIONS[precision]
    t, p, d, m = layout.tensor, layout.pipeline, layout.data, layout.micro_batches
    tokens, first, last = layout.micro_batch * model.length, int(own.first), int(own.last)
    activation = tokens * model.width * size.compute
    if layout.sequence_parallel:
        yield Planned("all_gather", activation, t, m * (6 * own.layers + first + 2 * last))
        yield Planned("reduce_scatter", activation, t, m * (4 * own.layers + first + last))
        norm = model.width * size.gradient
        yield Planned("all_reduce", norm, t, m * (2 * own.layers + last))
    else:
        yield Planned("all_reduce", activation, t, m * (4 * own.layers + first + last))
    if last:  # the largest logits, all numbers of words, and digests; then two sums
        yield Planned("all_reduce", 4 * (tokens + t + 2), t, m)
        yield Planned("all_reduce", 4 * 2 * tokens, t, m)
    sent = activation // (t if layout.sequence_parallel else 1)
    hops = m * (2 - first - last)  # activations to the next stage, gradients to the one before
    yield Planned("send", sent, p, hops)
    yield Planned("receive", sent, p, hops)
    held, routed = own.parameters(model, t), own.routed(model, layout)
    if layout.experts > 1:
        rows, each = activation * model.active, m * own.sparse
        yield Planned("all_to_all", 8 * model.experts, layout.experts, each)
        yield Planned("all_to_all", round(layout.imbalance * rows), layout.experts, 4 * each)
        one = size.gradient * routed // max(1, own.sparse)
        yield Planned("all_reduce", one, layout.expert_shards, each)
    else:
        held += routed
    if layout.stage < 3:
        gradients = ("reduce_scatter", m) if layout.stage == 2 else ("all_reduce", 1)
        yield Planned(gradients[0], size.gradient * held, d, gradients[1])
        yield Planned("all_gather", size.parameter * held, d, min(layout.stage, 1))
        return
    gathered = min(size.compute, size.parameter)
    for unit, many in own.units(model, t, layout.rows_in):
        yield Planned("all_gather", gathered * unit, d, 2 * m * many)
        yield Planned("reduce_scatter", size.gradient * unit, d, m * many)
