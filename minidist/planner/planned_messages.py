"""The messages of a step, one by one: what `step_time` adds up. Lesson: scaling_out"""

from collections.abc import Iterator
from typing import NamedTuple

from minidist.planner.layout import Layout, stages
from minidist.planner.model_states import PRECISIONS, STAGES, require_one_of
from minidist.planner.transformer import Transformer


class Planned(NamedTuple):
    """So many `times`, a collective or a message among `ranks`: `nbytes` of the whole vector, n in
    `md.collectives.cost`."""

    operation: str
    nbytes: int
    ranks: int
    times: int


def messages(model: Transformer, layout: Layout, precision: str = "mixed") -> list[Planned]:
    """What a rank of the first pipeline stage begins in a step, with nothing recomputed.
    Lesson: scaling_out.

    Along tensor, what `step_time` leaves out is here too: the embedding, the head, the loss; and
    with `sequence_parallel` the gradients of norms, and that backward gathers the inputs of columns
    again (arXiv 2205.05198, section 4.2.2). Along data, stages 0 to 2 have one message,
    however many buckets carry it.

    Raises ValueError for another layout, and as `peak` does.
    """
    require_one_of("precision", precision, PRECISIONS)
    require_one_of("stage", layout.stage, STAGES)
    require_one_of("recompute", layout.recompute, ("nothing",))
    require_one_of("chunks", layout.chunks, (1,))
    return [each for each in _all(model, layout, precision) if each.ranks > 1 and each.times]


def _all(model: Transformer, layout: Layout, precision: str) -> Iterator[Planned]:
    size, first = PRECISIONS[precision], stages(model, layout)[0]
    t, p, d, m = layout.tensor, layout.pipeline, layout.data, layout.micro_batches
    tokens, last = layout.micro_batch * model.length, int(first.last)
    activation = tokens * model.width * size.compute
    if layout.sequence_parallel:
        yield Planned("all_gather", activation, t, m * (6 * first.layers + 1 + 2 * last))
        yield Planned("reduce_scatter", activation, t, m * (4 * first.layers + 1 + last))
        norm = model.width * size.gradient
        yield Planned("all_reduce", norm, t, m * (2 * first.layers + last))
    else:
        yield Planned("all_reduce", activation, t, m * (4 * first.layers + 1 + last))
    if last:  # the largest logits, and all ranks' numbers of words; then two sums
        yield Planned("all_reduce", 4 * (tokens + t), t, m)
        yield Planned("all_reduce", 4 * 2 * tokens, t, m)
    sent = activation // (t if layout.sequence_parallel else 1)
    yield Planned("send", sent, p, m)
    yield Planned("receive", sent, p, m)
    own = first.parameters(model, t)
    if layout.stage < 3:
        gradients = ("reduce_scatter", m) if layout.stage == 2 else ("all_reduce", 1)
        yield Planned(gradients[0], size.gradient * own, d, gradients[1])
        yield Planned("all_gather", size.parameter * own, d, min(layout.stage, 1))
        return
    units = {model.embedding_parameters(t): 1, model.layer_parameters(t): first.layers}
    if last:
        units[model.head_parameters(t)] = 1
    gathered = min(size.compute, size.parameter)
    for unit, many in units.items():
        yield Planned("all_gather", gathered * unit, d, 2 * m * many)
        yield Planned("reduce_scatter", size.gradient * unit, d, m * many)
