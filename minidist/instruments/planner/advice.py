"""Which layout to take: of all that fit, one that is as good as the fastest. Lesson: zero."""

from collections.abc import Iterator
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
PLAIN: dict[str, Any] = {"replicate": 1, "chunks": 1, "micro_batches": 1, "recompute": "nothing"}
PLAIN |= {"stored_attention": False}


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


def _candidates(model: Transformer, layout: Layout, device: Device) -> Iterator[Layout]:
    """`layout`; then tensor and context parallel, pipelines, ZeRO with its forms, what is
    recomputed, and micro-batches of 1, 2, 4, 8: always of as many sequences."""
    yield layout
    powers = [2**i for i in range(8)]
    tensors = [t for t in powers if t <= device.per_node]
    contexts = [c for c in powers if c == 1 or model.length // c >= SHORTEST]
    for t, c, p in product(tensors, contexts, powers[:5]):
        data, left = divmod(layout.world_size, t * c * p)
        if left or not data or layout.sequences % data:
            continue
        each = layout.sequences // data
        axes = {"tensor": t, "context": c, "pipeline": p, "sequence_parallel": t > 1}
        wide = replace(layout, **axes, **PLAIN)
        sizes = [b for b in powers[:4] if each % b == 0]
        for b, how in product(sizes, [*_zero(wide, device)] if p == 1 else PIPELINES):
            one = replace(wide, micro_batch=b, micro_batches=each // b, **how)
            for again in RECOMPUTED:
                yield replace(one, recompute=again)


def _zero(layout: Layout, device: Device) -> Iterator[dict[str, Any]]:
    """Stages of ZeRO; the last one over all ranks, and with a copy of the shards on each node."""
    yield from ({"stage": stage} for stage in range(3))
    ranks = layout.data * layout.context
    nodes = max(1, ranks * layout.tensor // device.per_node)
    for n, reshard in product(sorted({1, nodes}), (True, False)):
        if ranks % n == 0:
            yield {"stage": 3, "replicate": n, "reshard_after_forward": reshard}
