"""A pipeline: a model too large for one rank is cut into stages, by layers.

Each rank has a stage, or several, and passes activations on to the next and gradients back. So that
ranks do not wait for one another all the time, the batch is cut into micro-batches, and a schedule
says who does what when. To read, in this order:

    naive           the idea: GPipe in one function
    instructions    a schedule is data: a list of what each rank does; can ranks run it?
    schedules       five of them, and how long each would take
    cut             from a whole model to the stages of each rank

and then the three files through which a step goes:

    pipeline        what users call: makes this rank's stages; tells all ranks of a batch
    executor        runs a rank's list: sends and receives; adds up what two stages share
    stage           computes: forward, backward, and for zero bubble backward in two parts

Lessons: layer_splitting, pipeline_schedules.
"""

from minidist.pipeline.cut import balance_by_cost, balance_by_parameters
from minidist.pipeline.instructions import Schedule, ScheduleError, Span, validate
from minidist.pipeline.pipeline import Pipeline
from minidist.pipeline.schedules import SCHEDULES, Prediction, simulate, with_messages

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
