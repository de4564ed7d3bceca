"""The course's charts, and the one palette that they share with the pictures in img/.

| chart | shows |
|---|---|
| `timeline` | when each rank, or thread, computed, communicated and waited |
| `traffic` | who sent how many bytes to whom |
| `bytes_per_rank` | bytes counted on each rank beside the bytes predicted |
| `time_against_size` | how the time of a collective grows with its message |
| `bars` | what was measured beside what one or more models say, by name |
| `stacked` | the same, by the parts that it is made of |
| `loss` | training curves, also where one lies upon another |
| `memory` | what a rank's memory holds, after each allocation and free |
| `memory_by_rank` | what the memory of each rank holds beside what a formula says |
| `schedule` | what each rank of a pipeline does when, predicted or measured |
| `sweep` | what was measured beside what was predicted, for each value of something |
| `breakdown` | of what parts several things consist, as bars from left to right |
| `frontier` | several ways to do one thing, by what each saves and what it costs |
| `roofline` | how fast operations are, under what memory and arithmetic allow |
| `pairs` | which rank computes which pairs of tokens, and in which step of a ring |
| `routing` | which token goes to which expert, on which rank |
| `load` | how full each expert is, over the steps of a training |
| `weights` | of whose gradients the gradients of several runs are made |

Every chart draws into the axes that it is given, or into a new figure as wide as a notebook,
returns the axes, and leaves matplotlib's settings as they were. Input with nothing to draw is
a ValueError. matplotlib is imported by the first chart, not by `import minidist`.
"""

from minidist.instruments.plot.bar_charts import bars, bytes_per_rank, stacked
from minidist.instruments.plot.breakdown_chart import breakdown
from minidist.instruments.plot.charts import loss, time_against_size, timeline, traffic
from minidist.instruments.plot.expert_charts import load, routing
from minidist.instruments.plot.frontier_chart import frontier
from minidist.instruments.plot.memory_charts import memory, memory_by_rank
from minidist.instruments.plot.pair_chart import pairs
from minidist.instruments.plot.palette import RANKS, color, human_bytes, human_time, style
from minidist.instruments.plot.roofline_chart import roofline
from minidist.instruments.plot.schedule_chart import schedule
from minidist.instruments.plot.sweep_chart import sweep
from minidist.instruments.plot.weight_chart import weights

__all__ = [
    "RANKS",
    "bars",
    "breakdown",
    "bytes_per_rank",
    "color",
    "frontier",
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
