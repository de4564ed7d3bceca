"""A pipeline: a model too large for one rank is cut into stages, by layers.

Each rank has a stage, or several, and passes activations on to the next and gradients back. So that
ranks do not wait for one another all the time, the batch is cut into micro-batches, and a schedule
says who does what when. To read, in this order:

    naive           the idea: GPipe in one function
    instructions    a schedule is data: a list of what each rank does; can ranks run it?
    schedules       five of them, and how long each would take
    cut             from a whole model to the stages of each rank; `equal_stages` says where to cut

and then the three files through which a step goes:

    pipeline        what users call: makes this rank's stages; tells all ranks of a batch
    executor        runs a rank's list: sends and receives; adds up what two stages share
    stage           computes: forward, backward, and for zero bubble backward in two parts

Lessons: layer_splitting, pipeline_schedules.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minidist.pipeline.instructions import Schedule, ScheduleError, Span, validate
from minidist.pipeline.schedules import SCHEDULES, Prediction, simulate, with_messages

if TYPE_CHECKING:
    from minidist.pipeline.cut import balance_by_cost, balance_by_parameters
    from minidist.pipeline.pipeline import Pipeline

__all__ = [
    "SCHEDULES",
    "Pipeline",
    "Prediction",
    "Schedule",
    "ScheduleError",
    "Span",
    "balance_by_cost",
    "balance_by_parameters",
    "simulate",
    "validate",
    "with_messages",
]


def __getattr__(name: str) -> Any:
    # On first use: schedules are there without torch, too, as in a browser.
    if name in __all__:
        room = "pipeline" if name == "Pipeline" else "cut"
        return getattr(import_module(f"minidist.pipeline.{room}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
