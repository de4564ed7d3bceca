"""Measuring what ranks do, while they do it: bytes sent, time and memory."""

from minidist.measure import record
from minidist.measure.copies import CopyCounter, cores_at_work
from minidist.measure.flops import count_flops
from minidist.measure.memory import MemoryTracker, Phase
from minidist.measure.ping_pong import fastest, fit, medians, ping_pong, tie_to_cores
from minidist.measure.soft import rounds
from minidist.measure.timeline import Span, Timeline
from minidist.measure.torch_calls import TorchCalls
from minidist.measure.traffic import TrafficCounter

__all__ = [
    "CopyCounter",
    "MemoryTracker",
    "Phase",
    "Span",
    "Timeline",
    "TrafficCounter",
    "cores_at_work",
    "count_flops",
    "fastest",
    "fit",
    "medians",
    "ping_pong",
    "rounds",
    "tie_to_cores",
]

record.SOURCES.append(TorchCalls())
