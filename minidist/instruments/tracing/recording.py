"""Recording a trace on a rank (lesson: reading_a_step).

torch's profiler sees operations, and what gloo and NCCL send. It sees nothing of the backend "shm",
which is Python. minidist's record sees all calls of torch.distributed, but none that torch makes in
C++ on gloo, as its DistributedDataParallel does. So a trace has both.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from minidist.instruments.measure import record as messages
from minidist.instruments.tracing.events import EPOCH, Event, Trace, numbered
from minidist.instruments.tracing.files import load


@contextmanager
def record() -> Iterator[Trace]:
    """Record what this rank does in the block; the trace is filled at its end.

        with md.tracing.record() as trace:
            for batch in batches:
                with trace.step():
                    train(batch)
        return trace

    Lesson: reading_a_step. Raises RuntimeError if a profiler is running already.

    Limits: operations of other threads than this one and autograd's are not seen. Torch's DDP on
    gloo does not say its group, so a part of the ranks counts as all. A trace begins at the same
    call on all ranks. Recording makes small operations slower: `python -m minidist bench tracing`.
    """
    if torch.autograd._profiler_enabled():
        raise RuntimeError("a profiler is running in this process already: record in its place")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else Kineto prints two lines a profile
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_initialized():
        activities.append(ProfilerActivity.CUDA)
    trace = Trace(rank)
    with profile(activities=activities) as prof, messages.observed() as sent:
        yield trace
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(path))
        seen = load(path)[0].spans
    trace.spans = numbered(joined(list(_communications(sent)), seen))


def _communications(sent: list[messages.Event]) -> Iterator[Event]:
    """Calls on the wall clock. The messages within a collective of minidist are left out."""
    # The rank may lose its core between the two clocks, which makes the difference smaller.
    wall = (max(time.time_ns() - time.perf_counter_ns() for _ in range(9)) - EPOCH) / 1e9
    for m in sent:
        if m.end is not None and not m.control and m.scope is None:
            detail: dict[str, Any] = {"group": list(m.group), "peer": m.peer, "nbytes": m.nbytes}
            detail["kind"] = "collective" if m.kind == "scope" else m.kind
            detail["blocked"] = [(start + wall, end + wall) for start, end in m.blocked]
            yield Event(m.operation, "communication", m.start + wall, m.end + wall, detail)


def joined(calls: list[Event], seen: list[Event]) -> list[Event]:
    """What the profiler saw, if it has NCCL's kernels, which are all there is. Else the calls, and
    what it saw but for what gloo does for them: all messages (torch sends none in C++), and for
    each collective one that begins within it. Another one may begin then as well: torch's DDP
    averages meanwhile."""
    if any(e.detail.get("group") for e in seen):
        return seen
    gloo = [e for e in seen if e.detail.get("kind") == "collective"]
    for call in sorted(calls, key=lambda call: call.end):
        began = [e for e in gloo if call.start <= e.start <= call.end]
        if began and call.detail["kind"] == "collective":
            gloo.remove(min(began, key=lambda e: (e.name != call.name, e.start)))
    return calls + gloo + [e for e in seen if e.category != "communication"]
