"""Measuring what ranks do, while they do it: bytes and time (lesson 2)."""

from minidist.measure import record
from minidist.measure.timeline import Span, Timeline, save_chrome_trace
from minidist.measure.torch_calls import TorchCalls
from minidist.measure.traffic import TrafficCounter, traffic_matrix

__all__ = ["Span", "Timeline", "TrafficCounter", "save_chrome_trace", "traffic_matrix"]

record.SOURCES.append(TorchCalls())
