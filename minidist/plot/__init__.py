"""The course's charts, and the one palette that they share with the pictures in img/.

| chart | lesson | shows |
|---|---|---|
| `timeline` | 1 to 4 | when each rank, or thread, computed, communicated and waited |
| `traffic` | 2 | who sent how many bytes to whom |
| `bytes_per_rank` | 2 | bytes counted on each rank beside the bytes predicted |
| `time_against_size` | 2 | how the time of a collective grows with its message |
| `loss` | 2 | training curves, also where one lies upon another |
| `memory` | 4 | what a rank's memory holds, after each allocation and free |
| `memory_by_rank` | 4 | what the memory of each rank holds beside what a formula says |
| `schedule` | 5 | what each rank of a pipeline does when, predicted or measured |
| `curves` | activation_checkpointing | one number against another, measured beside a formula |

Every chart draws into the axes that it is given, or into a new figure as wide as a notebook,
returns the axes, and leaves matplotlib's settings as they were. Input with nothing to draw is
a ValueError. matplotlib is imported by the first chart, not by `import minidist`.
"""

from minidist.plot.charts import bytes_per_rank, loss, time_against_size, timeline, traffic
from minidist.plot.curves import curves
from minidist.plot.memory_charts import memory, memory_by_rank
from minidist.plot.palette import RANKS, color, human_bytes, human_time, style
from minidist.plot.schedule_chart import schedule

__all__ = [
    "RANKS",
    "bytes_per_rank",
    "color",
    "curves",
    "human_bytes",
    "human_time",
    "loss",
    "memory",
    "memory_by_rank",
    "schedule",
    "style",
    "time_against_size",
    "timeline",
    "traffic",
]
