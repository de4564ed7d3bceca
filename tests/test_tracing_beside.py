"""Breakdowns beside those of Holistic Trace Analysis 0.5.0 (with pandas 2), which read the same
file: a GPU's, as torch's profiler writes it, with kernels at random on three streams."""

import json
import random

import pytest

from minidist.instruments import tracing
from minidist.instruments.tracing.events import EPOCH

# By seed, in microseconds, as `get_temporal_breakdown` and `get_comm_comp_overlap` say: idle,
# computing, the rest (communication that is exposed); and the part of communication that is hidden.
HTA = {0: (100, 1030, 99, 0.8266), 1: (120, 912, 166, 0.7519), 2: (231, 978, 300, 0.6479)}


def kernels(seed):
    """Two streams of products, one of all_reduces, each kernel with its launch."""
    draw, found = random.Random(seed), []
    for stream in 7, 8, 20:
        now = draw.randint(0, 40)
        for _ in range(20):
            name = "ncclDevKernel_AllReduce_Sum_f32" if stream == 20 else "gemm"
            row = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": now}
            about = {"stream": stream, "correlation": len(found) + 1, "device": 0}
            found.append(row | {"dur": draw.randint(1, 60), "args": about})
            now += found[-1]["dur"] + draw.randint(0, 50)
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 0, "tid": 1}
    for row in found[:]:
        about = {"correlation": row["args"]["correlation"]}
        found.append(launch | {"ts": row["ts"], "dur": 1, "args": about})
    return found


@pytest.mark.parametrize("seed", HTA)
def test_a_breakdown_is_what_holistic_trace_analysis_says(tmp_path, seed):
    path = tmp_path / "rank0.json"
    about = {"distributedInfo": {"rank": 0, "world_size": 2}, "baseTimeNanoseconds": EPOCH}
    path.write_text(json.dumps(about | {"traceEvents": kernels(seed)}))
    (trace,) = tracing.load(path)  # no steps: from the first kernel to the last
    found = tracing.breakdown(trace)
    times = [round(1e6 * each, 6) for each in (found.idle, found.computing, found.exposed)]
    assert (*times, round(found.hidden, 4)) == HTA[seed]
