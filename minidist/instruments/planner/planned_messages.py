"""The messages of a step, one by one: what `step_time` adds up. Lessons: scaling_out, experts"""

from collections.abc import Iterator
from typing import NamedTuple

from minidist.instruments.planner.layout import CONTEXT_ATTENTION, Layout, Stage, stages
from minidist.instruments.planner.model_states import PRECISIONS, STAGES, require_one_of
from minidist.instruments.planner.transformer import Transformer


class Planned(NamedTuple):
    """So many `times`, a collective or a message among `ranks`: `nbytes` of the whole vector, n in
    `md.collectives.cost`. `axis`: tensor, context, pipeline, experts or data, along which these
    ranks are neighbours. Ranks along context are replicas, too: those of data are among both."""

    operation: str
    nbytes: int
    ranks: int
    times: int
    axis: str


def messages(
    model: Transformer, layout: Layout, precision: str = "mixed", number: int = 0
) -> list[Planned]:
    """What a rank of pipeline stage `number` begins in a step, with nothing recomputed.
    Lesson: scaling_out.

    Along tensor, what `step_time` leaves out is here too: the embedding, the head, the loss; and
    with `sequence_parallel` the gradients of norms, and that backward gathers the inputs of columns
    again (arXiv 2205.05198, section 4.2.2). Along pipeline each rank sends whole activations; in
    `step_time` a tensor rank sends its part, as in Megatron. Along context, keys and values go
    round in a ring, or are gathered: `md.context_parallel.cost` has the same bytes. Along data,
    stages 0 to 2 have one message, however many buckets carry it.

    Raises ValueError for another layout, for a stage that is not there, and as `peak` does.
    """
    require_one_of("precision", precision, PRECISIONS)
    require_one_of("stage", layout.stage, (0, 1) if model.experts else STAGES)
    require_one_of("context_attention", layout.context_attention, CONTEXT_ATTENTION[:3])
    plain = ["recompute", "chunks", "replicate", "reshard_after_forward", "once"]
    for name in plain + ["tensor", "context"] * bool(model.experts):
        require_one_of(name, getattr(layout, name), (getattr(Layout(), name),))
    held = stages(model, layout)
    require_one_of("number", number, range(len(held)))
    planned = _all(model, layout, precision, held[number])
    return [each for each in planned if each.ranks > 1 and each.times]


def _all(model: Transformer, layout: Layout, precision: str, own: Stage) -> Iterator[Planned]:
    yield from _along_tensor(model, layout, precision, own)
    yield from _along_context(model, layout, precision, own)
    size, p, m = PRECISIONS[precision], layout.pipeline, layout.micro_batches
    activation = _tokens(model, layout) * model.width * size.compute
    sent = activation // (layout.tensor if layout.sequence_parallel else 1)
    hops = m * (2 - own.first - own.last)  # to the next stage, gradients to the one before
    yield Planned("send", sent, p, hops, "pipeline")
    yield Planned("receive", sent, p, hops, "pipeline")
    d, t = layout.shards, layout.tensor
    held, routed = own.parameters(model, t), own.routed(model, layout)
    if layout.experts > 1:
        e, rows, each = layout.experts, activation * model.active, m * own.sparse
        yield Planned("all_to_all", 8 * model.experts, e, each, "experts")
        yield Planned("all_to_all", round(layout.imbalance * rows), e, 4 * each, "experts")
        one = size.gradient * routed // max(1, own.sparse)
        yield Planned("all_reduce", one, layout.expert_shards, each, "data")
    else:
        held += routed
    if layout.stage < 3:
        gradients = ("reduce_scatter", m) if layout.stage == 2 else ("all_reduce", 1)
        yield Planned(gradients[0], size.gradient * held, d, gradients[1], "data")
        yield Planned("all_gather", size.parameter * held, d, min(layout.stage, 1), "data")
        return
    gathered = min(size.compute, size.parameter)
    for unit, many in own.units(model, t, layout.rows_in):
        yield Planned("all_gather", gathered * unit, d, 2 * m * many, "data")
        yield Planned("reduce_scatter", size.gradient * unit, d, m * many, "data")


def _along_tensor(
    model: Transformer, layout: Layout, precision: str, own: Stage
) -> Iterator[Planned]:
    size, t, m = PRECISIONS[precision], layout.tensor, layout.micro_batches
    tokens, first, last = _tokens(model, layout), int(own.first), int(own.last)
    activation, norm = tokens * model.width * size.compute, model.width * size.gradient
    if layout.sequence_parallel:
        gathers, sums = 6 * own.layers + first + 2 * last, 4 * own.layers + first + last
        yield Planned("all_gather", activation, t, m * gathers, "tensor")
        yield Planned("reduce_scatter", activation, t, m * sums, "tensor")
        yield Planned("all_reduce", norm, t, m * (2 * own.layers + last), "tensor")
    else:
        sums = 4 * own.layers + first + last
        yield Planned("all_reduce", activation, t, m * sums, "tensor")
    if last:  # the largest logits, all numbers of words, and digests; then two sums
        yield Planned("all_reduce", 4 * (tokens + t + 2), t, m, "tensor")
        yield Planned("all_reduce", 4 * 2 * tokens, t, m, "tensor")


def _along_context(
    model: Transformer, layout: Layout, precision: str, own: Stage
) -> Iterator[Planned]:
    c, each = layout.context, layout.micro_batches * own.layers
    keys = 2 * _tokens(model, layout) * model.kv_width(layout.tensor)  # and values, of a rank
    keys *= PRECISIONS[precision].compute
    if layout.context_attention == "ring":  # forward, backward, and their gradients
        yield Planned("send", keys, c, 3 * (c - 1) * each, "context")
        yield Planned("receive", keys, c, 3 * (c - 1) * each, "context")
    else:
        gathers = 1 if layout.context_attention == "gathered once" else 2
        yield Planned("all_gather", c * keys, c, gathers * each, "context")
        yield Planned("reduce_scatter", c * keys, c, each, "context")


def _tokens(model: Transformer, layout: Layout) -> int:
    """Of a micro-batch, on a rank."""
    return layout.micro_batch * model.length // layout.context
