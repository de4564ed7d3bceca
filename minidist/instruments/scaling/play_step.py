"""How long the step of a rank would take: its trace, played on the links of a device.

A rank computes, and each of its groups has a line of its own, on which messages go one after
another while the rank goes on, as NCCL's streams do. Where it waits for a message, it stands still
until that is there. So what is hidden behind computing is what the program hides, no more. The
other ranks are taken to do the same at the same time. Lesson: scaling_out
"""

from collections import defaultdict
from dataclasses import dataclass

from minidist.instruments.planner.device import Device
from minidist.instruments.scaling.one_rank import Message, Trace, Waited


@dataclass(frozen=True)
class Played:
    """Seconds of a step. compute: of its matrix products. communication: that messages take.
    waiting: the part of it in which the rank stands still; the rest is hidden."""

    compute: float
    communication: float
    waiting: float

    @property
    def hidden(self) -> float:
        return self.communication - self.waiting

    @property
    def total(self) -> float:
        return self.compute + self.waiting


def play(trace: Trace, device: Device) -> Played:
    """Play a trace. Times of messages are those of ring algorithms, over the links of `device`; a
    group whose ranks are in several nodes shares the nodes' cables with all groups like it.
    Lesson: scaling_out.

    Raises ValueError for a message to another pipeline stage: when that sends, one rank's trace
    does not tell. `planner.step_time` and `pipeline.simulate` are for pipelines.
    """
    clock = compute = communication = 0.0
    free: dict[tuple[int, ...], float] = defaultdict(float)  # of each group's line, from when on
    there: list[float] = []  # of each message, when it is
    for event in trace.events:
        if isinstance(event, Message):
            seconds = _seconds(event, device)
            communication += seconds
            free[event.group] = max(free[event.group], clock) + seconds
            there.append(free[event.group])
        elif isinstance(event, Waited):
            clock = max(clock, there[event.message])
        else:
            seconds = device.seconds(event)
            clock, compute = clock + seconds, compute + seconds
    end = max([clock, *there])
    return Played(compute, communication, end - compute)


def _seconds(message: Message, device: Device) -> float:
    operation, nbytes, group = message
    if operation in ("send", "receive"):
        raise ValueError("a pipeline's messages wait for other ranks: see planner.step_time")
    stride = group[1] - group[0] if len(group) > 1 else 1
    return device.ring(operation, len(group), nbytes, stride)
