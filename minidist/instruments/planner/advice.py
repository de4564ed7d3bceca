"""Which layout to take: of all that fit, one that is as good as the fastest. Lesson: zero."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from minidist.instruments.planner.device import Device
from minidist.instruments.planner.layout import Layout
from minidist.instruments.planner.peak import peak
from minidist.instruments.planner.step_time import step_time
from minidist.instruments.planner.transformer import Transformer

USABLE = 0.92  # of a memory; the rest goes to CUDA, NCCL's buffers and fragmentation
ERROR = 0.25  # of a predicted time: 53 of 56 published steps are as near (test_published_runs.py)
ALIKE = 0.02  # slower than the fastest: then the layout that is more like the given one is better
RECOMPUTED = "nothing", "elementwise", "operations", "layers"
SHORTEST = 8192  # tokens on a rank, if ranks share a sequence
PIPELINES = [{"stage": stage, "chunks": v} for stage in (0, 1) for v in (1, 2, 4)]
PLAIN: dict[str, Any] = {
    **{"replicate": 1, "chunks": 1, "micro_batches": 1},
    **{"recompute": "nothing", "stored_attention": False},
}


def fits(model: Transformer, layout: Layout, device: Device, **recipe: Any) -> bool:
    return peak(model, layout, **recipe).total <= USABLE * device.memory


def fastest(model: Transformer, layout: Layout, device: Device, **recipe: Any) -> Layout | None:
    """Of all layouts that fit on these ranks, with the same sequences a step, and whose step is at
    most `ALIKE` longer than the shortest: the one that is most like `layout`."""

    def changes(each: Layout) -> int:
        return sum(vars(each)[name] != value for name, value in vars(layout).items())

    found: dict[Layout, float] = {}
    for each in _candidates(model, layout, device):
        try:
            if fits(model, each, device, **recipe):
                found[each] = step_time(model, each, device, **recipe).total
        except ValueError:  # the model cannot be cut so
            continue
    least = min(found.values(), default=0.0)
    alike = [each for each, seconds in found.items() if seconds <= (1 + ALIKE) * least]
    return min(alike, key=lambda each: (changes(each), found[each]), default=None)


def enough_ranks(
    model: Transformer, layout: Layout, device: Device, **recipe: Any
) -> Layout | None:
    """The fastest on the fewest ranks on which one fits, of 2, 4, 8, … times as many. A node has
    one sequence a step at least."""
    for ranks in [layout.world_size * 2**i for i in range(1, 11)]:
        t = 2 ** ((min(ranks, device.per_node) & -min(ranks, device.per_node)).bit_length() - 1)
        if ranks % t or (model.kv_heads or model.heads) % t:
            t = 1
        m = max(1, layout.sequences * t // ranks)
        asked = {name: getattr(layout, name) for name in ("experts", "imbalance", "once")}
        best = fastest(model, Layout(ranks, t, micro_batches=m, **asked), device, **recipe)
        if best:
            return best
    return None


def layouts(
    model: Transformer,
    ranks: int,
    sequences: int,
    device: Device,
    contexts: Sequence[int] = (1,),
    chunks: Sequence[int] = (1, 4, 8),
    recompute: Sequence[str] = RECOMPUTED,
    **recipe: Any,
) -> dict[Layout, float]:
    """Seconds of a step of so many sequences by each layout that fits on these ranks: all meshes,
    stages of ZeRO, hybrid sharding, micro-batches of one sequence; each with the first of
    `recompute` that fits. Lesson: scaling_out."""
    found: dict[Layout, float] = {}
    for t, c, p in product((1, 2, 4, 8), contexts, (1, 2, 4, 8, 16)):
        data = ranks // (t * c * p)
        if not data or sequences % data:
            continue
        ways: list[dict[str, Any]]
        ways = [{"stage": stage, "chunks": v} for stage in (0, 1) for v in chunks]
        if p == 1:
            hybrid = {"stage": 3, "replicate": max(1, ranks // device.per_node)}
            ways = [*({"stage": stage} for stage in range(4)), hybrid]
        axes: dict[str, Any] = {"micro_batches": sequences // data, "context": c}
        for way in ways:
            for again in recompute:
                try:
                    each = Layout(
                        ranks, t, p, sequence_parallel=t > 1, recompute=again, **axes, **way
                    )
                    if fits(model, each, device, **recipe):
                        found[each] = step_time(model, each, device, **recipe).total
                        break
                except ValueError:  # the model, or the ranks, cannot be cut so
                    break
    return found


def _candidates(model: Transformer, layout: Layout, device: Device) -> Iterator[Layout]:
    """`layout`; then tensor and context parallel, pipelines, experts on each rank, shared by a node
    or as given, ZeRO with its forms, what is recomputed, and micro-batches of 1, 2, 4, 8: always of
    as many sequences."""
    yield layout
    powers = [2**i for i in range(8)]
    tensors = [t for t in powers if t <= device.per_node]
    contexts = [c for c in powers if c == 1 or model.length // c >= SHORTEST]
    shared = sorted({1, layout.experts, device.per_node}) if model.experts else [1]
    for t, c, p, e in product(tensors, contexts, powers[:5], shared):
        data, left = divmod(layout.world_size, t * c * p)
        if left or not data or layout.sequences % data or layout.world_size // p % e:
            continue
        each = layout.sequences // data
        axes = {"tensor": t, "context": c, "pipeline": p, "sequence_parallel": t > 1, "experts": e}
        axes |= {"imbalance": min(layout.imbalance, e), "once": layout.once and e > 1}
        wide = replace(layout, **axes, **PLAIN)
        sizes = [b for b in powers[:4] if each % b == 0]
        for b, how in product(sizes, [*_zero(wide, device)] if p == 1 else PIPELINES):
            one = replace(wide, micro_batch=b, micro_batches=each // b, **how)
            for again, pieces in product(RECOMPUTED, (1, 8)):
                yield replace(one, recompute=again, loss_chunks=pieces)


def _zero(layout: Layout, device: Device) -> Iterator[dict[str, Any]]:
    """Stages of ZeRO; the last one over all ranks, and with a copy of the shards on each node."""
    yield from ({"stage": stage} for stage in range(3))
    ranks = layout.data * layout.context
    nodes = max(1, ranks * layout.tensor // device.per_node)
    for n, reshard in product(sorted({1, nodes}), (True, False)):
        if ranks % n == 0 and ranks // n * layout.tensor % layout.experts == 0:
            yield {"stage": 3, "replicate": n, "reshard_after_forward": reshard}
