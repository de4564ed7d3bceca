"""The planner's answer as a page of text: `python -m minidist plan`. Lesson: zero."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from minidist.planner.advice import USABLE, fastest, fits, ladder
from minidist.planner.device import Device
from minidist.planner.layout import Layout
from minidist.planner.model_states import STAGES, largest_model, memory, smallest_world_size
from minidist.planner.peak import peak
from minidist.planner.step_time import step_time
from minidist.planner.transformer import Transformer


def states_page(parameters: float, world_size: int, nbytes: float, **recipe: Any) -> str:
    """The model states of a model of which only the size is known, and which of them fit in
    `nbytes` a rank. `recipe`: optimizer and precision. Raises ValueError as `memory` does."""
    rows = []
    for stage, name in STAGES.items():
        held = memory(parameters, world_size, stage, **recipe)
        most = _or_none(largest_model, nbytes, world_size, stage, **recipe)
        ranks = _or_none(smallest_world_size, nbytes, parameters, stage, **recipe)
        sizes = [*map(_gb, [*held.categories.values(), held.total])]
        rows.append([name, *sizes, "yes" if held.total <= nbytes else "no", most, ranks])
    titles = ["", *held.categories, "total", "fits", "largest model", "ranks needed"]
    return f"""{parameters:,.0f} parameters, world size {world_size:,}: GB on each rank of \
{_gb(nbytes)} GB
{table(titles, rows)}
Activations and time need a shape: --model, or --layers, --width and --heads."""


def page(
    name: str, model: Transformer, layout: Layout, device: Device, stage: int | None, **recipe: Any
) -> str:
    """What the fullest rank holds in each stage of ZeRO, what fits, what to turn on next, and how
    long a step takes with `stage`, or with the first one that fits. `recipe` as above."""
    plans = {STAGES[each]: replace(layout, stage=each) for each in STAGES}
    fitting = [key for key, each in plans.items() if fits(model, each, device, **recipe)]
    chosen = STAGES[stage] if stage is not None else (fitting or ["DDP"])[0]
    rungs = dict(ladder(model, plans[chosen], device, **recipe))
    *_, now = [plans[chosen], *rungs.values()]
    best = fastest(model, now, device, **recipe)
    said = [
        f"{name}: {model.parameters / 1e9:,.4g} billion parameters on {layout.world_size:,} "
        f"rank{'s' * (layout.world_size > 1)} = "
        f"data {layout.data} × pipeline {layout.pipeline} × tensor {layout.tensor}",
        f"A step: {layout.sequences:,} sequence{'s' * (layout.sequences > 1)} of "
        f"{model.length:,} tokens; on each replica {layout.micro_batches} × {layout.micro_batch}",
        f"\nGB at the peak of a step, on the fullest rank; of {_gb(USABLE * device.memory)}",
        _plans(model, plans, device, **recipe),
        f"\n{chosen} {'fits' if chosen in fitting else 'does not fit'}.",
    ]
    if rungs:
        said += ["Turn on next, one after the other:", _plans(model, rungs, device, **recipe)]
    elif chosen not in fitting:
        said += ["Nothing that could be turned on saves memory."]
    if best and best != now:
        what = f"tensor {best.tensor}{', sequence parallel' * best.sequence_parallel}"
        what += f", {STAGES[best.stage]}"
        what += ", recompute layers" if best.recompute == "layers" else ""
        said += [f"The fastest that fits on {now.world_size:,} ranks, with such micro-batches:"]
        said += [_plans(model, {what: best}, device, **recipe)]
    said += [
        "",
        _time(model, now, device, recipe["precision"], [chosen, *rungs][-1]),
        "",
        _assumed(now, device, **recipe),
    ]
    return "\n".join(said)


def _plans(model: Transformer, plans: dict[str, Layout], device: Device, **recipe: Any) -> str:
    """A table of layouts: memory, whether it fits, time, speed, model FLOPs utilisation."""
    held = {name: peak(model, layout, **recipe) for name, layout in plans.items()}
    kinds = list(dict.fromkeys(kind for each in held.values() for kind in each.categories))
    rows = []
    for name, layout in plans.items():
        seconds = step_time(model, layout, device, recipe["precision"]).total
        rate = layout.sequences * model.length / seconds / layout.world_size
        sizes = [held[name].categories.get(kind, 0) for kind in kinds]
        rows.append([name, *map(_gb, [*sizes, held[name].total])])
        rows[-1] += ["yes" if fits(model, layout, device, **recipe) else "no", f"{seconds:.3g}"]
        rows[-1] += [f"{rate:,.0f}", f"{rate * model.flops / device.flops:.0%}"]
    titles = [kind.removeprefix("optimizer ") for kind in kinds]
    return table(["", *titles, "total", "fits", "s a step", "tokens/s/rank", "MFU"], rows)


def _time(model: Transformer, layout: Layout, device: Device, precision: str, row: str) -> str:
    took = step_time(model, layout, device, precision)
    parts = {"computing": took.compute, "bubble": took.bubble, "tensor": took.tensor}
    parts |= {"pipeline": took.pipeline, "data": took.data - took.hidden}
    shares = ", ".join(f"{name} {each / took.total:.0%}" for name, each in parts.items())
    return f"""A step ({row}) takes {took.total:.3g} s: {shares}.
Waiting for messages is {took.communication / took.total:.0%}; another {took.hidden:.3g} s of \
messages travel behind computing."""


def _assumed(layout: Layout, device: Device, *, optimizer: str, precision: str) -> str:
    inside, outside = (
        f"{1e-9 / (line.seconds(1) - line.seconds(0)):,.3g} GB/s"
        for line in (device.link, device.link.inter or device.link)
    )
    return f"""Assumed
- {device.utilisation:.0%} of {device.flops / 1e12:,.4g} TFLOP/s while computing (--utilisation)
- {inside} between two ranks of a node, {outside} from a node of {device.per_node} to others \
(--gbps); ring collectives
- {1 - USABLE:.0%} of {_gb(device.memory)} GB is for CUDA, NCCL and fragmentation
- {precision}, {optimizer}; {"stored" if layout.stored_attention else "flash"} attention; \
activations and loss as eager torch has them (fused kernels need less), without dropout"""


def _or_none(limit: Callable[..., int], *values: Any, **recipe: Any) -> str:
    try:
        found = limit(*values, **recipe)
    except ValueError:
        return "none"
    return f"{found / 1e9:,.3g} billion" if limit is largest_model else f"{found:,}"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.0f}" if nbytes >= 100e9 else f"{nbytes / 1e9:.3g}"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    lines = [titles, *rows]
    first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
    return "\n".join(
        "  ".join([name.ljust(first), *map(str.rjust, cells, widths)]) for name, *cells in lines
    )
