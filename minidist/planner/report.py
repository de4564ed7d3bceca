"""The planner's answer as a page of text: `python -m minidist plan` (lesson 12)."""

from collections.abc import Iterator, Sequence
from typing import Any

from minidist.planner.speed import Machine, step_time
from minidist.planner.states import STAGES, largest_model, memory, smallest_world_size


def report(parameters: float, world_size: int, nbytes: float, **options: Any) -> str:
    """What a rank holds in each stage, whether it fits in `nbytes`, and what would. `options` are
    those of `memory`. Raises ValueError as `memory` does."""
    held = {stage: memory(parameters, world_size, stage, **options) for stage in STAGES}
    sizes = sorted({4**power for power in range(20) if 4**power < world_size} | {world_size})
    totals = {
        size: [memory(parameters, size, stage, **options).total for stage in STAGES]
        for size in sizes
    }
    room = f"{_gb(nbytes)} GB"
    fits = [STAGES[stage] for stage, each in held.items() if each.total <= nbytes]
    return "\n".join(
        [
            f"{parameters:,.0f} parameters, world size {world_size:,}: GB on each rank",
            *_table(
                ["", *held[0].categories, "total"],
                [
                    [STAGES[stage], *map(_gb, [*each.categories.values(), each.total])]
                    for stage, each in held.items()
                ],
            ),
            "",
            "The total on other numbers of ranks",
            *_table(
                ["ranks", *STAGES.values()],
                [[f"{size:,}", *map(_gb, each)] for size, each in totals.items()],
            ),
            "",
            f"In {room} fits {', '.join(fits) or 'nothing'}",
            *_table(
                ["", f"largest model, world size {world_size:,}", "ranks that this model needs"],
                [
                    [STAGES[stage], *_limits(parameters, world_size, nbytes, stage, options)]
                    for stage in STAGES
                ],
            ),
        ]
    )


def speeds(
    parameters: float, world_size: int, tokens: float, machine: Machine, precision: str
) -> str:
    """How long a step takes in each stage."""
    rows = []
    for stage, name in STAGES.items():
        took = step_time(
            parameters, world_size, stage, tokens=tokens, machine=machine, precision=precision
        )
        seconds = took.compute, took.communication, took.total, took.overlapped
        rows.append([name, *(f"{each:.3g}" for each in seconds)])
    title = f"Seconds a step, with {tokens:,.0f} tokens a rank"
    found = (
        f"(ranks like these: {machine.flops / 1e9:.3g} GFLOP/s, α {machine.alpha * 1e6:.3g} µs, "
        f"1/β {1e-9 / machine.beta if machine.beta else float('inf'):.3g} GB/s)"
    )
    titles = ["", "compute", "communication", "one after the other", "overlapped"]
    return "\n".join([f"{title} {found}", *_table(titles, rows)])


def _limits(
    parameters: float, world_size: int, nbytes: float, stage: int, options: dict[str, Any]
) -> Iterator[str]:
    try:
        yield f"{largest_model(nbytes, world_size, stage, **options) / 1e9:,.3g} billion"
    except ValueError:
        yield "none"
    try:
        yield f"{smallest_world_size(nbytes, parameters, stage, **options):,}"
    except ValueError:
        yield "no number"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.0f}" if nbytes >= 100e9 else f"{nbytes / 1e9:.3g}"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The first column to the left, the others to the right."""
    lines = [titles, *rows]
    first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
    for name, *cells in lines:
        right = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        yield "  ".join([name.ljust(first), *right])
