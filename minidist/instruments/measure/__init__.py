"""Measuring what ranks do, while they do it: bytes sent, time and memory."""

from minidist.instruments.measure import record
from minidist.instruments.measure.copies import CopyCounter, cores_at_work
from minidist.instruments.measure.flops import count_flops
from minidist.instruments.measure.memory import MemoryTracker, Phase
from minidist.instruments.measure.ping_pong import (
    crossing,
    fastest,
    fit,
    medians,
    ping_pong,
    tie_to_cores,
    together,
)
from minidist.instruments.measure.soft import rounds
from minidist.instruments.measure.step_timelines import step_seconds, step_timelines
from minidist.instruments.measure.timeline import Span, Timeline, waiting
from minidist.instruments.measure.torch_calls import TorchCalls
from minidist.instruments.measure.traffic import TrafficCounter

__all__ = [
    "CopyCounter",
    "MemoryTracker",
    "Phase",
    "Span",
    "Timeline",
    "TrafficCounter",
    "cores_at_work",
    "count_flops",
    "crossing",
    "fastest",
    "fit",
    "medians",
    "ping_pong",
    "rounds",
    "step_seconds",
    "step_timelines",
    "tie_to_cores",
    "waiting",
    "together",
]

record.SOURCES.append(TorchCalls())
