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
        rows.append([name, *map(_gb, [*held.categories.values(), held.total])])
        rows[-1].append("yes" if held.total <= nbytes else "no")
        for limit in (
            lambda s=stage: f"{largest_model(nbytes, world_size, s, **recipe) / 1e9:.3g} billion",
            lambda s=stage: f"{smallest_world_size(nbytes, parameters, s, **recipe):,}",
        ):
            rows[-1].append(_or_none(limit))
    titles = ["", *held.categories, "total", "fits", "largest model", "ranks needed"]
    return f"""{parameters:,.0f} parameters, world size {world_size:,}: GB on each rank of \
{_gb(nbytes)} GB
{_table(titles, rows)}
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
    took, room = step_time(model, now, device, recipe["precision"]), now.micro_batch
    while fits(model, replace(now, micro_batch=room + 1), device, **recipe):
        room += 1
    advice = [f"{chosen} {'fits' if chosen in fitting else 'does not fit'}."]
    if rungs:
        advice += ["Turn on next, one after the other:", _plans(model, rungs, device, **recipe)]
    elif chosen not in fitting:
        advice.append("Nothing that could be turned on saves memory.")
    if room > now.micro_batch:
        advice.append(f"Then there is room for micro-batches of {room} sequences.")
    if best := fastest(model, now, device, **recipe):
        what = f"tensor {best.tensor}, {STAGES[best.stage]}"
        what += ", recompute layers" if best.recompute == "layers" else ""
        advice.append(
            f"The fastest that fits on {now.world_size:,} ranks, with such micro-batches:"
        )
        advice.append(_plans(model, {what: best}, device, **recipe))
    parts = {"computing": took.compute, "bubble": took.bubble, "tensor": took.tensor}
    parts |= {"pipeline": took.pipeline, "data": took.data - took.hidden}
    shares = ", ".join(f"{key} {each / took.total:.0%}" for key, each in parts.items())
    advised = "\n".join(advice)
    return f"""{name}: {model.parameters / 1e9:,.4g} billion parameters on {layout.world_size:,} \
ranks = data {layout.data} × pipeline {layout.pipeline} × tensor {layout.tensor}
A step: {layout.sequences:,} sequences of {model.length:,} tokens; on each replica \
{layout.micro_batches} × {layout.micro_batch}

GB at the peak of a step, on the fullest rank; {_gb(USABLE * device.memory)} can be used
{_plans(model, plans, device, **recipe)}

{advised}

Such a step takes {took.total:.3g} s: {shares}.
Waiting for messages is {took.communication / took.total:.0%}; another {took.hidden:.3g} s of \
messages travel behind computing.

Assumed
- {device.utilisation:.0%} of {device.flops / 1e12:,.4g} TFLOP/s while computing (--utilisation)
- {_speed(device, leaves=False)} GB/s between two ranks of a node, {_speed(device, leaves=True)} \
from a node of {device.per_node} to others (--gbps); ring collectives
- {1 - USABLE:.0%} of {_gb(device.memory)} GB is for CUDA, NCCL and fragmentation
- {recipe["precision"]} precision, {recipe["optimizer"]}; no dropout; \
{"stored" if now.stored_attention else "flash"} attention; activations and loss as eager torch has \
them (fused kernels need less)"""


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
    return _table(["", *titles, "total", "fits", "s a step", "tokens/s/rank", "MFU"], rows)


def _speed(device: Device, leaves: bool) -> str:
    link = device.link.inter if leaves and device.link.inter else device.link
    return f"{1e-9 / (link.seconds(1) - link.seconds(0)):,.3g}"


def _or_none(text: Callable[[], str]) -> str:
    try:
        return text()
    except ValueError:
        return "none"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.0f}" if nbytes >= 100e9 else f"{nbytes / 1e9:.3g}"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    lines = [titles, *rows]
    first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
    return "\n".join(
        "  ".join([name.ljust(first), *map(str.rjust, cells, widths)]) for name, *cells in lines
    )
