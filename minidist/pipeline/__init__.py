"""A pipeline: a model too large for one rank is cut into stages, by layers.

Each rank has a stage, or several, and passes activations on to the next and gradients back. So that
ranks do not wait for one another all the time, the batch is cut into micro-batches, and a schedule
says who does what when. To read, in this order:

    naive           the idea: GPipe in one function
    instructions    a schedule is data: a list of what each rank does
    schedules       five of them; `simulate` and `validate` say what can be known of one before it
                    runs, `balance` where to cut the model
    pipeline        what users call: cuts the model, and runs a step
    preparation     before a step: ranks agree on its rows and shapes (`specs`)
    executor        runs a rank's list; sends and receives
    stage           computes

and the edges: `split` (backward in two parts), `replay` (forward a second time), `ties` (parameters
of two stages). Lessons: layer_splitting, pipeline_schedules.
"""

from minidist.pipeline.balance import balance_by_cost, balance_by_parameters
from minidist.pipeline.instructions import Schedule
from minidist.pipeline.pipeline import Pipeline
from minidist.pipeline.schedules import SCHEDULES, with_messages
from minidist.pipeline.simulate import Prediction, Span, simulate
from minidist.pipeline.validate import ScheduleError, validate

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
