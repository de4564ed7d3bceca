"""The room "Does it fit, how long does it take?": a layout, and the fastest one that fits."""

from dataclasses import asdict
from typing import Any

from minidist.instruments.planner import (
    GPUS,
    MODELS,
    PRECISIONS,
    STAGES,
    Device,
    Layout,
    Transformer,
    mfu,
    peak,
    step_time,
)
from minidist.instruments.planner.advice import ERROR, RECOMPUTED, USABLE, fastest

ASKED = (  # of a Layout: what has a control of its own
    "world_size tensor pipeline context stage micro_batch recompute sequence_parallel chunks "
    "replicate reshard_after_forward loss_chunks experts"
).split()


def choices() -> dict[str, Any]:
    """Names of models (and how many experts each has), GPUs, precisions, stages of ZeRO, and what
    can be computed again."""
    return {
        "models": {name: model.experts or 0 for name, model in MODELS.items()},
        "gpus": list(GPUS),
        "precisions": list(PRECISIONS),
        "stages": {str(stage): name for stage, name in STAGES.items()},
        "recompute": list(RECOMPUTED),
    }


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Bytes of the fullest GPU, and seconds of a step, each by its parts.

    asked: `model`, `gpu`, `precision`; `batch`, the sequences of a step; and what ASKED names, of a
    Layout. With `search`, the fastest layout that fits takes their place: what it changes is `set`.
    """
    model, gpu = MODELS[asked["model"]], GPUS[asked["gpu"]]
    found: dict[str, Any] = {}
    if asked.get("search"):
        layout = _fastest(model, gpu, asked)
        named = {name: getattr(layout, name) for name in ASKED}
        found["set"] = {name: value for name, value in named.items() if value != asked[name]}
    else:
        layout = _layout(asked)
    held = peak(model, layout, precision=asked["precision"])
    took = step_time(model, layout, gpu, precision=asked["precision"])
    parts = asdict(took)
    parts["data"] -= parts.pop("hidden")
    tokens = layout.sequences * model.length
    return found | {
        "data": layout.data,
        "micro_batches": layout.micro_batches,
        "memory": held.categories,
        "total": held.total,
        "usable": USABLE * gpu.memory,
        "device": gpu.memory,
        "times": parts,
        "seconds": took.total,
        "hidden": took.hidden,
        "error_of_time": ERROR,
        "tokens": tokens,
        "rate": tokens / took.total / layout.world_size,
        "mfu": mfu(model, layout, gpu, took.total),
        "days": 1e12 / tokens * took.total / 86400,  # of a trillion tokens
    }


def _layout(asked: dict[str, Any]) -> Layout:
    """The layout with as many micro-batches as the batch is made of."""
    layout = Layout(**{name: asked[name] for name in ASKED})
    micro_batches, left = divmod(asked["batch"], layout.sequences)
    if left or not micro_batches:
        raise ValueError(
            f"{asked['batch']} sequences a step are no multiple of {layout.sequences}: there are "
            f"{layout.data} replicas, and each takes {layout.micro_batch} at once"
        )
    return Layout(**{name: asked[name] for name in ASKED}, micro_batches=micro_batches)


def _fastest(model: Transformer, gpu: Device, asked: dict[str, Any]) -> Layout:
    ranks, batch = asked["world_size"], asked["batch"]
    try:
        given = _layout(asked)
    except ValueError:  # it cannot be: then one of which only the ranks and the batch matter
        given = Layout(ranks, pipeline=ranks, micro_batches=batch)
    found = fastest(model, given, gpu, precision=asked["precision"])
    if found is None:
        raise ValueError(
            f"no layout fits on {ranks} of these GPUs with {batch} sequences a step: take more "
            "GPUs, or another batch"
        )
    return found
