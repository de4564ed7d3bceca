"""The room "Pipeline schedules": five schedules, simulated with the same numbers."""

from functools import lru_cache
from typing import Any

from minidist.instruments.link import Link
from minidist.pipeline.instructions import (
    Backward,
    BackwardInputs,
    BackwardWeights,
    Forward,
    Instruction,
    Schedule,
)
from minidist.pipeline.schedules import SCHEDULES, Prediction, find, simulate

NAMES: dict[type[Instruction], str] = {  # as in minidist's palette
    Forward: "forward",
    Backward: "backward",
    BackwardInputs: "backward for inputs",
    BackwardWeights: "backward for weights",
}


def choices() -> dict[str, Any]:
    """The names of the schedules."""
    return {"schedules": list(SCHEDULES)}


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """`table` has a row of each schedule, or why it cannot be; `spans`, of the one that is asked
    for, what each rank computes when, in seconds.

    asked: `schedule`; `ranks`, `microbatches`, `nodes`, and `chunks`, a rank's stages if they are
    interleaved; `forward`, `inputs` and `weights`, the milliseconds of a rank for one micro-batch;
    `gbps` (0: messages take no time) and `latency_us` of the link; `mb`, the megabytes of a
    message.
    """
    table: list[dict[str, Any]] = []
    spans: list[Any] = []
    for name in SCHEDULES:
        try:
            chunks, found = _simulated(name, asked)
        except ValueError as error:
            table.append({"name": name, "error": str(error)})
            continue
        kept = [count / chunks for count in found.in_flight]
        table.append({"name": name, "time": found.time, "idle": found.idle, "kept": kept})
        if name == asked["schedule"]:
            spans = _drawn(found)
    return {"table": table, "spans": spans}


def _simulated(name: str, asked: dict[str, Any]) -> tuple[int, Prediction]:
    """How many stages a rank has, and the step. Its layers are the same in any schedule: a stage of
    several takes a part of the time, and keeps a part of the activations."""
    ranks, microbatches = asked["ranks"], asked["microbatches"]
    chunks = asked["chunks"] if name == "interleaved" else 1
    made = _made(name, ranks, microbatches, chunks)
    forward, inputs, weights = (
        asked[part] * 1e-3 / chunks for part in ("forward", "inputs", "weights")
    )
    link = Link(asked["gbps"], asked["latency_us"]) if asked["gbps"] else None
    nbytes = asked["mb"] * 1e6
    return chunks, simulate(made, forward, inputs, weights, link, nbytes, asked["nodes"])


@lru_cache(20)
def _made(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Kept, since most sliders leave it as it is."""
    return find(name, ranks, microbatches, chunks * ranks)


def _drawn(found: Prediction) -> list[list[dict[str, Any]]]:
    return [
        [
            {
                "what": NAMES[type(span.instruction)],
                "stage": span.instruction.stage,
                "microbatch": span.instruction.microbatch,
                "start": span.start,
                "end": span.end,
            }
            for span in own
        ]
        for own in found.spans
    ]
