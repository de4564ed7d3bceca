"""What to turn on: until a training fits, and so that it is fast. Lesson: zero."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from minidist.planner.device import Device
from minidist.planner.layout import Layout
from minidist.planner.model_states import STAGES
from minidist.planner.peak import peak
from minidist.planner.step_time import step_time
from minidist.planner.transformer import Transformer

USABLE = 0.92  # of a memory; the rest goes to CUDA, NCCL's buffers and fragmentation


def fits(model: Transformer, layout: Layout, device: Device, **recipe: Any) -> bool:
    return peak(model, layout, **recipe).total <= USABLE * device.memory


def ladder(
    model: Transformer, layout: Layout, device: Device, **recipe: Any
) -> Iterator[tuple[str, Layout]]:
    """Names of what to turn on until it fits, the cheapest first, each with the layout that has it
    and all before; only what saves memory. The global batch stays until ranks are added."""
    start, m, t = layout, layout.micro_batches * layout.micro_batch, layout.tensor
    stages = _stages(layout)
    rungs: list[tuple[str, dict[str, Any]]] = [
        ("flash attention", {"stored_attention": False}),
        ("ZeRO-1", {"stage": 1}),
        ("sequence parallel", {"sequence_parallel": True}),
        ("micro-batch 1", {"micro_batch": 1, "micro_batches": m}),
        *[(STAGES[stage], {"stage": stage}) for stage in stages[2:]],
        ("recompute layers", {"recompute": "layers"}),
    ]
    for k in [2**i for i in range(1, 8) if t * 2**i <= device.per_node]:
        wider = {"tensor": t * k, "micro_batches": m * k, "sequence_parallel": True}
        rungs.append((f"tensor {t * k}", wider | {"micro_batch": 1}))
    for N in [layout.world_size * 2**i for i in range(1, 11)]:
        rungs.append((f"{N:,} ranks", {"world_size": N, "stage": max(*stages, layout.stage)}))
    for name, change in rungs:
        if fits(model, layout, device, **recipe):
            break
        try:
            changed = replace(layout, **change)
            saves = peak(model, changed, **recipe).total < peak(model, layout, **recipe).total
        except ValueError:  # the model or the ranks cannot be cut so
            continue
        if saves:
            layout = changed
            yield f"+ {name}", layout
    again = replace(layout, recompute=start.recompute)
    if again != layout and fits(model, again, device, **recipe):
        yield "- recompute layers", again


def fastest(model: Transformer, layout: Layout, device: Device, **recipe: Any) -> Layout | None:
    """The layout with most tokens a second, of all that fit on these ranks with so many pipeline
    stages and such micro-batches: tensor within a node, ZeRO, recomputing or not."""

    def rate(each: Layout) -> float:
        return each.sequences / step_time(model, each, device, recipe["precision"]).total

    found = []
    wide = [2**i for i in range(8) if 2**i <= device.per_node]
    for t, stage, again in product(wide, _stages(layout), ("nothing", "layers")):
        ranks = t * layout.pipeline
        m = max(1, layout.sequences * ranks // (layout.world_size * layout.micro_batch))
        change = {"tensor": t, "stage": stage, "recompute": again, "micro_batches": m}
        try:
            each = replace(layout, sequence_parallel=t > 1, **change)
            if fits(model, each, device, **recipe):
                found.append(each)
        except ValueError:
            continue
    return max(found, key=rate, default=None)


def _stages(layout: Layout) -> range:
    """Of ZeRO, that go with a pipeline: 2 and 3 would send for each micro-batch."""
    return range(4 if layout.pipeline == 1 else 2)
