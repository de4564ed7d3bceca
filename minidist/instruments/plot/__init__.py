"""The course's charts, and the one palette that they share with the pictures in img/.

| chart | shows |
|---|---|
| `timeline` | when each rank, or thread, computed, communicated and waited |
| `traffic` | who sent how many bytes to whom |
| `time_against_size` | how the time of a collective grows with its message |
| `bars` | what was measured beside what one or more models say, by name |
| `stacked` | the same, by the parts that it is made of |
| `loss` | training curves, also where one lies upon another |
| `memory` | what a rank's memory holds, after each allocation and free |
| `memory_by_rank` | what the memory of each rank holds beside what a formula says |
| `schedule` | what each rank of a pipeline does when, predicted or measured |
| `sweep` | what was measured beside what was predicted, for each value of something |
| `breakdown` | of what parts several things consist, as bars from left to right |
| `roofline` | how fast operations are, under what memory and arithmetic allow |
| `pairs` | which rank computes which pairs of tokens, and in which step of a ring |
| `routing` | which token goes to which expert, on which rank |
| `load` | how full each expert is, over the steps of a training |
| `weights` | of whose gradients the gradients of several runs are made |

Every chart draws into the axes that it is given, or into a new figure as wide as a notebook,
returns the axes, and leaves matplotlib's settings as they were. Input with nothing to draw is
a ValueError. matplotlib is imported by the first chart, not by `import minidist`.
"""

from minidist.instruments.plot.bar_charts import (
    bars,
    breakdown,
    memory_by_rank,
    stacked,
)
from minidist.instruments.plot.dot_charts import roofline
from minidist.instruments.plot.heat_maps import load, traffic, weights
from minidist.instruments.plot.line_charts import loss, sweep, time_against_size
from minidist.instruments.plot.memory_chart import memory
from minidist.instruments.plot.palette import RANKS, color, human_bytes, human_time, style
from minidist.instruments.plot.span_charts import schedule, timeline
from minidist.instruments.plot.token_charts import pairs, routing

__all__ = [
    "RANKS",
    "bars",
    "breakdown",
    "color",
    "human_bytes",
    "human_time",
    "load",
    "loss",
    "memory",
    "memory_by_rank",
    "pairs",
    "roofline",
    "routing",
    "schedule",
    "stacked",
    "style",
    "sweep",
    "time_against_size",
    "timeline",
    "traffic",
    "weights",
]
