"""The planner's answer as a page of text: `python -m minidist plan`. Lesson: zero."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from minidist.instruments.planner.advice import ALIKE, ERROR, USABLE, enough_ranks, fastest, fits
from minidist.instruments.planner.device import REACHED, Device
from minidist.instruments.planner.layout import Layout
from minidist.instruments.planner.model_states import (
    PRECISIONS,
    STAGES,
    largest_model,
    memory,
    smallest_world_size,
)
from minidist.instruments.planner.peak import peak
from minidist.instruments.planner.step_time import mfu, step_time
from minidist.instruments.planner.transformer import Transformer


def states_page(parameters: float, world_size: int, nbytes: float, **recipe: Any) -> str:
    """The model states of a model of which only the size is known, and which of them fit in
    `nbytes` a rank. `recipe`: optimizer and precision. Raises ValueError as `memory` does."""
    rows, usable = [], USABLE * nbytes
    for stage, name in STAGES.items():
        held = memory(parameters, world_size, stage, **recipe)
        most = _or_none(largest_model, usable, world_size, stage, **recipe)
        ranks = _or_none(smallest_world_size, usable, parameters, stage, **recipe)
        sizes = [*map(_gb, [*held.categories.values(), held.total])]
        rows.append([name, *sizes, "yes" if held.total <= usable else "no", most, ranks])
    titles = ["", *held.categories, "total", "fits", "largest model", "ranks needed"]
    return f"""{parameters:,.0f} parameters, world size {world_size:,}: GB on each rank, of \
{_gb(usable)} that can be used
{table(titles, rows)}
Activations and time need a shape: --model, or --layers, --width and --heads."""


def page(
    name: str, model: Transformer, layout: Layout, device: Device, stage: int | None, **recipe: Any
) -> str:
    """What the fullest rank holds in each stage of ZeRO, whether that fits, how long a step takes;
    a layout that fits and is as fast as any; and where the numbers are from. The given layout has
    `stage`, or the first one that fits. `recipe` as above."""
    plans = {STAGES[each]: replace(layout, stage=each) for each in STAGES}
    fitting = [key for key, each in plans.items() if fits(model, each, device, **recipe)]
    chosen = STAGES[stage] if stage is not None else (fitting or ["ZeRO-3"])[0]
    best = fastest(model, plans[chosen], device, **recipe)
    used = f", {model.active_parameters / 1e9:,.4g} billion active," * bool(model.experts)
    said = [
        f"{name}: {model.parameters / 1e9:,.4g} billion parameters{used} on {layout.world_size:,} "
        f"rank{'s' * (layout.world_size > 1)} = {_mesh(layout)}",
        f"A step: {_sequences(layout)} of {model.length:,} tokens; on each replica "
        f"{layout.micro_batches} × {layout.micro_batch}",
        "\nGB at the peak of a step, on the fullest rank; "
        f"{_gb(USABLE * device.memory)} can be used",
        _plans(model, plans, device, **recipe),
        "",
    ]
    given, advised = plans[chosen], best or enough_ranks(model, plans[chosen], device, **recipe)
    if not advised:
        return "\n".join([*said, "No layout fits, on any number of ranks."])
    where = f"with the same {_sequences(layout)} a step"
    near = f"is within {ALIKE:.0%} of the fastest that fits"
    if advised == given:
        said += [f"{chosen} {near}, {where}."]
    else:
        if not best:
            said += [f"Nothing fits on {layout.world_size:,} ranks {where}."]
            where = f"on {advised.world_size:,} ranks, with {_sequences(advised)} a step"
        table_of_one = _plans(model, {STAGES[advised.stage]: advised}, device, **recipe)
        said += [f"This {near} {where}:", table_of_one, f"    {_flags(advised)}"]
    said += ["", _time(model, advised, device, **recipe)]
    if chosen in fitting and advised != given:
        before, now = (step_time(model, each, device, **recipe).total for each in (given, advised))
        gain = before / now - 1
        said += [f"That is {gain:.0%} faster than {chosen} as above{_worth(gain)}."]
    said += [_price(model, advised, device, **recipe), _scaling(model, advised, device, **recipe)]
    return "\n".join([*said, sources(advised, device, **recipe)])


def _mesh(layout: Layout) -> str:
    said = f"data {layout.data:,} × pipeline {layout.pipeline}"
    said += f" × context {layout.context}" * (layout.context > 1) + f" × tensor {layout.tensor}"
    return said + f"; experts shared by {layout.experts}" * (layout.experts > 1)


def _sequences(layout: Layout) -> str:
    return f"{layout.sequences:,} sequence{'s' * (layout.sequences > 1)}"


def _flags(layout: Layout) -> str:
    """What differs from the default, as the command takes it."""
    said = [f"--world-size {layout.world_size} --stage {layout.stage}"]
    for name, value in vars(layout).items():
        if name in ("world_size", "stage") or (value == getattr(Layout(), name)):
            continue
        flag = f"--{name.replace('_', '-')}"
        given = flag if value is True else f"{flag} {value}"
        said.append(f"--no-{flag[2:]}" if value is False else given)
    if layout.pipeline > 1 and layout.micro_batches == 1:
        said.append("--micro-batches 1")
    return " ".join(said)


def _worth(gain: float) -> str:
    return "" if gain > ERROR else f", which is less than the error of ± {ERROR:.0%}: measure both"


def _plans(model: Transformer, plans: dict[str, Layout], device: Device, **recipe: Any) -> str:
    """A table of layouts: memory, whether it fits, time, speed, model FLOPs utilisation."""
    held = {name: peak(model, layout, **recipe) for name, layout in plans.items()}
    kinds = list(dict.fromkeys(kind for each in held.values() for kind in each.categories))
    rows = []
    for name, layout in plans.items():
        seconds = step_time(model, layout, device, **recipe).total
        rate = layout.sequences * model.length / seconds / layout.world_size
        sizes = [held[name].categories.get(kind, 0) for kind in kinds]
        rows.append([name, *map(_gb, [*sizes, held[name].total])])
        rows[-1] += ["yes" if fits(model, layout, device, **recipe) else "no", f"{seconds:.3g}"]
        rows[-1] += [f"{rate:,.0f}", f"{mfu(model, layout, device, seconds):.0%}"]
    titles = [kind.removeprefix("optimizer ") for kind in kinds]
    return table(["", *titles, "total", "fits", "s a step", "tokens/s/rank", "MFU"], rows)


def _time(model: Transformer, layout: Layout, device: Device, **recipe: Any) -> str:
    took = step_time(model, layout, device, **recipe)
    parts = {"computing": took.compute, "bubble": took.bubble, "tensor": took.tensor}
    parts |= {"context": took.context} if layout.context > 1 else {}
    parts |= {"experts": took.experts} if layout.experts > 1 else {}
    parts |= {"pipeline": took.pipeline, "data": took.data - took.hidden}
    parts |= {"optimizer": took.optimizer}
    shares = ", ".join(f"{name} {each / took.total:.0%}" for name, each in parts.items())
    return f"""A step takes {took.total:.3g} s ± {ERROR:.0%}: {shares}.
Waiting for messages is {took.communication / took.total:.0%}; another {took.hidden:.3g} s of \
messages travel behind computing."""


def _price(model: Transformer, layout: Layout, device: Device, **recipe: Any) -> str:
    """Of a trillion tokens, if nothing fails: `failures` says what that costs."""
    seconds = step_time(model, layout, device, **recipe).total
    steps = 1e12 / (layout.sequences * model.length)
    days = steps * seconds / 86400
    hours = float(f"{days * 24 * layout.world_size:.3g}")
    return (
        f"A trillion tokens: {steps:,.0f} steps, {float(f'{days:.3g}'):,g} days, {hours:,.0f} "
        "GPU-hours, if nothing fails."
    )


def _scaling(model: Transformer, layout: Layout, device: Device, **recipe: Any) -> str:
    """The same on 2, 4 and 8 times as many ranks, each with as many sequences."""
    if layout.data == 1:
        return ""
    reached = []
    for times in 1, 2, 4, 8:
        more = replace(layout, world_size=times * layout.world_size)
        seconds = step_time(model, more, device, **recipe).total
        reached.append(f"{mfu(model, more, device, seconds):.0%} on {more.world_size:,}")
    return f"MFU with as many sequences a rank: {', '.join(reached)} ranks.\n"


def sources(layout: Layout, device: Device, *, optimizer: str, precision: str) -> str:
    """Where a page's numbers are from, and how far off they may be."""
    size, usable = PRECISIONS[precision], f"{USABLE:.0%} of the {_gb(device.memory)} GB"
    each = f"{size.parameter} + {size.gradient} + {size.states(optimizer):.3g}"
    attention = "stored" if layout.stored_attention else "flash"
    at = f"at {device.utilisation:.0%} of {device.flops / 1e12:,.4g} TFLOP/s (--utilisation)"
    if not layout.stored_attention:
        reached = device.attention or device.utilisation
        at += f"; half of attention, which is causal, at {reached:.0%} (FlashAttention-2: arXiv "
        at += "2307.08691, section 4.1)"
    inside, outside = (
        f"{1e-9 / (line.seconds(1) - line.seconds(0)):,.3g} GB/s and {line.seconds(0) * 1e6:.3g} µs"
        for line in (device.link, device.link.inter or device.link)
    )
    said = [
        f"parameters, gradients, states: {each} bytes ({precision}, {optimizer}); ZeRO's stages 1, "
        f"2, 3 share out the last, the last two, all, among {layout.shards:,} ranks (arXiv "
        "1910.02054, sections 3.1 and 5). FSDP has 4 + 4 + 8 (--precision autocast), Megatron "
        "2 + 4 + 12 (--precision megatron)",
        f"activations: {attention} attention, no dropout, as eager torch keeps them (arXiv "
        f"2205.05198, Table 2); logits: {size.compute + 12} bytes a token and word; copies: "
        "parameters that are gathered, or cast, to compute. ZeRO-3 shares out rows: each parameter "
        "is padded to as many rows for each rank",
        f"fits: {usable} that torch finds (--memory); the rest is for CUDA, NCCL and gaps",
        f"computing: 6 operations a weight and token (arXiv 2001.08361, section 2.1) {at}; and "
        f"each activation goes 4 times through memory, at {device.bandwidth / 1e12:.3g} TB/s",
        f"optimizer: {size.touched(optimizer):.3g} bytes a parameter through memory",
        f"messages: rings, {inside} between ranks of a node, {outside} from a node of "
        f"{device.per_node} to others (--gbps). Of the presets, {REACHED:.0%} of the data sheets, "
        "and latencies of NCCL (src/graph/tuning.cc). ZeRO-1 sends what Megatron's sends; behind a "
        "DDP, as in torch, half as much again",
        "MFU: 6 operations a weight that multiplies a token, attention counted whole, nothing for "
        "recomputing (arXiv 2204.02311, appendix B). Some also count the looked-up embedding",
        f"± {ERROR:.0%}: as near are 17 of 19 published steps on a100, 13 of 13 on h100, 1 of 1 on "
        "h200, 1 of 2 on b200, 21 of 21 on h100-500w (tests/test_published_runs.py). To these the "
        "presets' utilisation is fitted. Slower cards reach less: h100-500w is torchtitan's; "
        "by h100, 15 of its 21 steps are further off. 12 of 20 published peaks are within 10%, "
        "the others 26% below to 108% above",
    ]
    if layout.experts > 1:
        said += [
            f"experts: the fullest rank has {layout.imbalance:g} times the mean (--imbalance); a "
            f"token travels once to each {'rank or node' if layout.once else 'expert'} (--once), "
            "and nothing hides that. 3 of 10 published steps are as near as above, the others "
            "planned at 0.46 to 1.49 times what they took: small experts compute slower"
        ]
    if layout.stage == 3 and layout.shards > 128:
        said += [
            "ZeRO-3 may be slower: GPT-3 by DeepSpeed of 2021, on 768 and 1,536 A100, took 2.1 "
            "to 4.2 times as long as planned (arXiv 2104.04473, Table 2). Measure one all_gather"
        ]
    if layout.stage == 3 and layout.tensor > 1:
        said += [
            "torch's tensor parallel needs more where the loss decides: torchtitan's 70B took 1.35 "
            "times the memory that is planned (benchmarks/llama3_h100_202412, Table 4)"
        ]
    if layout.stage == 3 and layout.pipeline > 1:
        said += [
            "ZeRO-3 in a pipeline may need more: torchtitan's took 1.1 to 1.3 times the memory "
            "that is planned (benchmarks/llama3_h100_202412, Tables 5 and 6)"
        ]
    lines = [textwrap.fill(each, 100, subsequent_indent="  ") for each in said]
    return "Where the numbers are from\n- " + "\n- ".join(lines)


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
