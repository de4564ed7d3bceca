"""Where a step's time goes: traces of all ranks, and what a device could do.

    def work():
        with md.tracing.record() as trace:
            for batch in batches:
                with trace.step():
                    train(batch)
        return trace

    traces = r(work)
    md.tracing.save(traces, "step.json")          # open it in ui.perfetto.dev
    md.tracing.breakdown(traces[0])               # computing, exposed communication, idle
    md.tracing.cause(traces)                      # who holds up the others

To read: `events` (a trace), `account` (one rank's time), `across` (all ranks), `recording` and
`files`; apart from these, `roofline` and `utilisation`.
Lesson: reading_a_step.
"""

from minidist.instruments.tracing.account import both, breakdown, length, strips, union
from minidist.instruments.tracing.across import (
    align,
    cause,
    critical_path,
    drawn,
    late,
    offset,
    seconds_of,
    waits,
)
from minidist.instruments.tracing.events import Event, Trace
from minidist.instruments.tracing.files import load, save, validate
from minidist.instruments.tracing.recording import record
from minidist.instruments.tracing.roofline import bandwidth, own_time, point, product
from minidist.instruments.tracing.utilisation import mfu, model_flops

__all__ = [
    "Event",
    "Trace",
    "align",
    "bandwidth",
    "both",
    "breakdown",
    "cause",
    "critical_path",
    "drawn",
    "late",
    "length",
    "load",
    "mfu",
    "model_flops",
    "offset",
    "own_time",
    "point",
    "product",
    "record",
    "save",
    "seconds_of",
    "strips",
    "union",
    "validate",
    "waits",
]
