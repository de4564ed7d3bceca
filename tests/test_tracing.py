"""Traces: where a step's time goes, and who waits for whom.

The oracles: time on a grid, cut into slices, of which each is looked at alone; a simulated step of
which the slow rank, the waits and the critical path are known; and, of what is recorded, counts.
"""

import gzip
import json
import pickle
import random
from collections import Counter
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.profiler import profile, record_function

import minidist as md
from minidist.instruments.measure import Span, Timeline, record
from minidist.instruments.tracing import Event, Trace
from minidist.instruments.tracing.recording import joined


def computes(start, end, name="aten::mm"):
    return Event(name, "compute", start, end)


def call(start, end, index, name="all_reduce", **detail):
    detail = {"kind": "collective", "group": [], "peer": None, "nbytes": 8, "index": index} | detail
    return Event(name, "communication", start, end, detail)


def message(kind, start, end, index, peer):
    return call(start, end, index, "isend", kind=kind, peer=peer, blocked=[(start, end)])


def step(start, end, number=0):
    return Event(f"ProfilerStep#{number}", "phase", start, end)


def drawn_spans(draw, count):
    starts = [draw.randrange(60) for _ in range(count)]
    return [(start, start + draw.randrange(1, 9)) for start in starts]


# Times are whole seconds, whose sums are exact. A slice is one of them.


def slices(spans):
    """In which one of these is under way."""
    return {second for start, end in spans for second in range(start, end)}


def blocked(e):
    return slices(e.detail.get("blocked", []))


def busy(trace):
    own = set().union(*map(blocked, trace.of("communication")))
    return slices((e.start, e.end) for e in trace.of("compute")) - own


def under_way(e):
    """Who sends has to do with a message only while it stands still."""
    return blocked(e) if e.detail["kind"] == "sent" else slices([(e.start, e.end)])


def communicates(trace):
    return set().union(*map(under_way, trace.of("communication")))


# ---- one rank's time --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_spans_as_sets_of_slices(seed):
    draw = random.Random(seed)
    a, b = (drawn_spans(draw, draw.randrange(8)) for _ in range(2))
    joined = md.tracing.union(a)
    assert slices(joined) == slices(a) and md.tracing.length(joined) == len(slices(a))
    assert all(end < start for (_, end), (start, _) in pairwise(joined))
    assert slices(md.tracing.both(joined, md.tracing.union(b))) == slices(a) & slices(b)


def drawn(draw, rank=0):
    """A trace of operations and calls at random, which overlap as they like."""
    spans = [computes(*span) for span in drawn_spans(draw, 8)]
    for index, (start, end) in enumerate(sorted(drawn_spans(draw, 6))):
        stood = [(start, draw.randrange(start, end + 1)), (end - 1, end)][: draw.randrange(3)]
        kind = draw.choice(["collective", "sent"])
        spans.append(call(start, end, index, kind=kind, blocked=stood))
    return Trace(rank, [*spans, step(5, 50)])


@pytest.mark.parametrize("seed", range(8))
def test_breakdown_against_slices(seed):
    trace = drawn(random.Random(seed))
    for start, end in [(5, 50), (20, 31), (0, 80)]:
        found, window = md.tracing.breakdown(trace, start, end), set(range(start, end))
        own, sent = busy(trace) & window, communicates(trace) & window
        assert (found.step, found.computing) == (end - start, len(own))
        assert (found.overlapped, found.exposed) == (len(own & sent), len(sent - own))
        assert found.idle == len(window - own - sent)
        assert found.hidden == (len(own & sent) / len(sent) if sent else 1)
        assert sum(found.parts.values()) == pytest.approx(found.step)
    strips, window = md.tracing.strips(trace), set(range(5, 50))
    for category, whole in {"compute": busy(trace), "communication": communicates(trace)}.items():
        assert slices((e.start, e.end) for e in strips.of(category)) == whole & window
    assert md.tracing.breakdown(trace) == md.tracing.breakdown(trace, 5, 50)


def test_a_trace():
    trace = Trace(0, [computes(1, 2), step(1, 4), computes(4, 6), step(5, 9, 1)])
    assert [e.name for e in trace.steps()] == ["ProfilerStep#0", "ProfilerStep#1"]
    assert (trace.window(), trace.shifted(3).window()) == ((1, 9), (4, 12))
    assert Trace(0, [computes(0, 9), computes(2, 3)]).window() == (0, 9)
    (moved,) = Trace(1, [call(2, 5, 0, blocked=[(2, 5)])]).shifted(-2).spans
    assert (moved.start, moved.end, moved.detail["blocked"]) == (0, 3, [(0, 3)])
    with pytest.raises(ValueError, match="rank 3's trace is empty"):
        Trace(3).window()
    again = pickle.loads(pickle.dumps(trace))
    assert again == trace and isinstance(again.step(), record_function)


# ---- several ranks ----------------------------------------------------------------------------


def simulated(durations, transfer=2, loads=None):
    """The traces of a step. Each rank computes so many seconds before each all_reduce, which ends
    for all at once, `transfer` after the last one has come. loads: waiting for data, by rank."""
    traces, now = [Trace(rank) for rank in range(len(durations))], 0
    for k, of_call in enumerate(zip(*durations, strict=True)):
        starts = []
        for trace, seconds in zip(traces, of_call, strict=True):
            begins = now + (loads or {}).get(trace.rank, 0)
            starts.append(begins + seconds)
            trace.spans.append(computes(begins, starts[-1]))
        now = max(starts) + transfer
        for trace, start in zip(traces, starts, strict=True):
            trace.spans.append(call(start, now, k, blocked=[(start, now)]))
    return [Trace(trace.rank, [*trace.spans, step(0, now)]) for trace in traces]


def durations(draw, ranks=4, calls=6):
    of_calls = [draw.sample(range(10, 60), ranks) for _ in range(calls)]
    return list(zip(*of_calls, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_a_step_whose_critical_path_is_known(seed):
    transfer = 3 * (seed % 2)
    seconds = durations(random.Random(seed))
    traces, slowest = simulated(seconds, transfer), list(map(max, zip(*seconds, strict=True)))
    end = sum(slowest) + 6 * transfer
    path = md.tracing.critical_path(traces)
    assert (path[0].start, path[-1].end) == (0, end)
    assert all(one.end == other.start for one, other in pairwise(path))
    expected = {f"rank {rank}": 0 for rank in range(4)} | {"messages": 6 * transfer}
    for own, last in zip(zip(*seconds, strict=True), slowest, strict=True):
        expected[f"rank {own.index(last)}"] += last
    assert md.tracing.seconds_of(path).items() <= expected.items()
    start = slowest[0] + transfer - 1  # within the first message
    assert md.tracing.drawn(path).window() == (0, end)
    part = md.tracing.seconds_of(md.tracing.critical_path(traces, start, end - 1))
    assert sum(part.values()) == end - 1 - start
    for rank, found in md.tracing.waits(traces).items():
        assert found == (sum(slowest) - sum(seconds[rank]), 6 * transfer)


@pytest.mark.parametrize("wait", [[], [(2, 2), (10, 10)]])
def test_what_computing_hides_is_not_on_the_path(wait):
    own = [step(0, 12), computes(0, 10), call(2, 6, 0, blocked=wait)]
    path = md.tracing.critical_path([Trace(0, own), Trace(1, own)])
    assert [leg[2:] for leg in path] == [(0, 12, "")]


def test_the_path_of_messages():
    """Rank 0 computes for 3 and sends, rank 1 for 4 and sends back, 1 each on the way; rank 2 is
    done soon."""
    first = [message("sent", 3, 3, 0, 1), message("received", 3, 9, 0, 1), computes(9, 11)]
    second = [message("received", 0, 4, 0, 0), computes(4, 8), message("sent", 8, 9, 0, 0)]
    spans = [[computes(0, 3), *first], second, [computes(0, 5)]]
    traces = [Trace(rank, [step(0, 11), *each]) for rank, each in enumerate(spans)]
    assert [leg[:4] for leg in md.tracing.critical_path(traces)] == [
        *[("rank", 0, 0, 3), ("message", 1, 3, 4), ("rank", 1, 4, 8)],
        *[("message", 0, 8, 9), ("rank", 0, 9, 11)],
    ]
    assert md.tracing.waits(traces) == {0: (5, 1), 1: (3, 2), 2: (0, 0)}


@pytest.mark.parametrize("seed", range(8))
def test_waits_against_slices(seed):
    """Of calls that overlap each other and computing: while one of them lacks a rank, this one
    waits for others."""
    draw, lasts = random.Random(seed), []
    traces = [drawn(draw, rank) for rank in range(3)]
    for trace in traces:
        trace.spans = [e for e in trace.spans if e.category != "communication"]
    for k in range(5):
        starts = [draw.randrange(12 * k, 12 * k + 9) for _ in traces]
        lasts.append(max(starts))
        for trace, start in zip(traces, starts, strict=True):
            trace.spans.append(call(start, lasts[k] + draw.randrange(1, 5), k))
    for trace in traces:
        lacking = slices((e.start, lasts[e.detail["index"]]) for e in trace.of("communication"))
        exposed = (communicates(trace) - busy(trace)) & set(range(7, 45))
        others = len(exposed & lacking)
        found = md.tracing.waits(traces, 7, 45)[trace.rank]
        assert found == (others, len(exposed) - others)
        assert sum(found) == md.tracing.breakdown(trace, 7, 45).exposed


@pytest.mark.parametrize("calls", [1, 20])
@pytest.mark.parametrize("slow", range(4))
def test_the_late_rank_and_why(slow, calls):
    draw = random.Random(slow)
    even = [[100 + draw.randrange(5) for _ in range(calls)] for _ in range(4)]
    double = [[each * (1 + (rank == slow)) for each in own] for rank, own in enumerate(even)]
    traces = simulated(double)
    why, rank, seconds = md.tracing.cause(traces)
    assert (why, rank) == ("slow device", slow) and 95 * calls <= seconds <= 110 * calls
    late = md.tracing.late(traces)
    assert 95 <= late.pop(slow) <= 110 and all(-110 <= each < 5 for each in late.values())
    assert md.tracing.cause(simulated(even, loads={slow: 90}))[:2] == ("slow loader", slow)
    assert md.tracing.cause(simulated(even)) == ("nobody", None, 0.0)
    assert md.tracing.cause(simulated(even, transfer=500)) == ("nobody", None, 0.0)
    exposed = {trace.rank: md.tracing.breakdown(trace).exposed for trace in traces}
    assert min(exposed, key=exposed.get) == slow  # the slow one communicates least


@pytest.mark.parametrize("seed", range(5))
def test_clocks_are_found_again(seed):
    draw = random.Random(seed)
    traces = simulated(durations(draw), draw.randrange(1, 4))
    shifts = [0, *(draw.randrange(-500, 500) for _ in traces[1:])]
    moved = [trace.shifted(by) for trace, by in zip(traces, shifts, strict=True)]
    aligned, first = md.tracing.align(moved), traces[0].of("communication")
    for trace, by, before, after in zip(moved, shifts, traces, aligned, strict=True):
        if trace.rank:
            low, high = md.tracing.offset(trace, moved[0])
            pairs = list(zip(trace.of("communication"), first, strict=True))
            fit = [
                more
                for more in range(-700, 701)
                if all(a.end + more >= b.start and b.end >= a.start + more for a, b in pairs)
            ]
            assert (low, high) == (fit[0], fit[-1]) and low <= -by <= high
            assert 2 * abs(after.window()[0] - before.window()[0]) <= high - low
    later = moved[1].shifted(2000).spans[6:]
    with pytest.raises(ValueError, match="no offset fits"):  # a clock was set meanwhile
        md.tracing.offset(Trace(1, moved[1].spans[:6] + later), Trace(0, traces[0].spans))


def two(second=lambda trace: trace):
    """Two ranks' traces, of which something happens to the second."""
    one, other = simulated([[3, 4, 5], [4, 4, 4]])
    return [one, second(other)]


CLOCK = r"on one clock by md\.tracing\.align"
BAD = {
    "of one rank": (lambda: two()[:1], "takes a trace of each rank"),
    "one rank twice": (lambda: two()[:1] * 2, r"these are of \[0, 0\]"),
    "other steps": (
        lambda: two(lambda trace: Trace(1, [*trace.spans, step(20, 30, 1)])),
        r"rank 1 \['ProfilerStep#0', 'ProfilerStep#1'\]",
    ),
    "cut short": (
        lambda: two(lambda trace: Trace(1, trace.spans[:-2] + trace.spans[-1:])),
        "rank 0 has all_reduce 2 .* rank 1 has not: its trace is cut",
    ),
    "silent": (lambda: [Trace(r, [computes(0, 1), step(0, 1)]) for r in (0, 1)], "no communic"),
    "a clock behind": (lambda: two(lambda trace: trace.shifted(-50)), CLOCK),
    "a clock ahead": (lambda: two(lambda trace: trace.shifted(50)), CLOCK),
}


@pytest.mark.parametrize("case", BAD)
def test_traces_that_say_nothing_together(case):
    make, words = BAD[case]
    for analysis in ("late", "waits", "critical_path", "cause"):
        with pytest.raises(ValueError, match=words):
            getattr(md.tracing, analysis)(make())


# ---- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["traces.json", "traces.json.gz"])
def test_a_file_of_all_ranks(name, tmp_path):
    draw, path = random.Random(0), tmp_path / name
    traces = [drawn(draw, rank).shifted(1e7 + 1e-9) for rank in range(3)]
    for k in range(2):
        traces[0].spans.append(message("sent", 1e7 + k, 1e7 + k + 1, k, 1))
        traces[1].spans.append(message("received", 1e7, 1e7 + 2 + k, k, 0))
    md.tracing.save(traces, path)
    found = md.tracing.load(path)
    assert [trace.rank for trace in found] == [0, 1, 2]
    for trace, other in zip(traces, found, strict=True):
        in_order = sorted(trace.spans, key=lambda e: (e.start, -e.end))
        for own, e in zip(in_order, other.spans, strict=True):
            assert (own.name, own.category) == (e.name, e.category)
            assert json.loads(json.dumps(own.detail)) == e.detail
            assert abs(own.start - e.start) < 2e-9 and abs(own.end - e.end) < 2e-9
    written = read(path)["traceEvents"]
    assert md.tracing.validate(path) == len(written)
    assert [e["args"]["name"] for e in written if e["ph"] == "M"][:2] == ["rank 0", "phase"]
    arrows = [e for e in written if e["ph"] in "sf"]
    assert [(e["pid"], e["id"]) for e in arrows] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    for put, got in zip(arrows[::2], arrows[1::2], strict=True):
        assert got["ts"] - put["ts"] == pytest.approx(2e6)
    for change, words in BROKEN.items():
        events = [dict(e) for e in written]
        broken = [e for e in events if change(e) is not True]
        (tmp_path / "broken.json").write_text(json.dumps({"traceEvents": broken}))
        with pytest.raises(ValueError, match=words):
            md.tracing.validate(tmp_path / "broken.json")
    (tmp_path / name).write_bytes(path.read_bytes()[:-200])
    for read_it in md.tracing.load, md.tracing.validate:
        with pytest.raises(ValueError, match=f"{name} is no trace, or was cut short"):
            read_it(path)


BROKEN = {  # True: the event is left out
    (lambda e: e.update(tid=0)): "overlap in the row",
    (lambda e: e["ph"] == "f"): "one end",
    (lambda e: e.pop("pid")): "lacks pid",
    (lambda e: "dur" in e and e.update(dur=-1)): "lacks a time",
}


def read(path):
    with gzip.open(path) if path.suffix == ".gz" else open(path) as file:
        return json.load(file)


def test_timelines_in_a_file(tmp_path):
    path, timelines = tmp_path / "timelines.json", [Timeline(), Timeline()]
    timelines[1].rank = 1
    for timeline in timelines:
        timeline.spans = [Span("forward", "compute", 5.0, 5.5 + timeline.rank)]
        timeline.spans.append(Span("send", "communication", 5.25, 6.0))
    md.tracing.save(timelines, path)
    assert md.tracing.validate(path) == 2 * (1 + 2 + 2)
    for timeline, trace in zip(timelines, md.tracing.load(path), strict=True):
        assert [Span(e.name, e.category, e.start, e.end) for e in trace.spans] == timeline.spans
    md.tracing.save([], path)
    assert md.tracing.validate(path) == 0


def nccl(start, end, name):
    args = {"Collective name": name, "Process Group Ranks": "[0, 1]", "In msg nelems": 7}
    return written("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", start, end, 20, args)


def written(name, kind, start, end, tid=7, args=None):
    times = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
    return {"ph": "X", "cat": kind, "name": name, "pid": 0, "tid": tid, "args": args or {}} | times


def test_torchs_file_of_a_gpu(tmp_path):
    """Its layout: launches and annotations on the host, kernels on streams."""
    paths = []
    for rank, late in enumerate([0, 3]):
        events = [
            written("ProfilerStep#4", "user_annotation", 0, 20, 1),
            written("ProfilerStep#4", "gpu_user_annotation", 1, 20),
            written("aten::mm", "cpu_op", 0, 1, 1),
            written("cudaLaunchKernel", "cuda_runtime", 0, 1, 1),
            written("sm80_xmma_gemm", "kernel", 1 + late, 9 + late),
            nccl(6 + late, 11 + late if late else 14, "allreduce"),
            written("vectorized_elementwise", "kernel", 15, 16),
            nccl(16, 18, "_allgather_base"),
            *([nccl(19, 20, "recv")] if rank else []),  # as in a pipeline: not all ranks have it
            {"ph": "i", "name": "Iteration Start", "pid": 0, "tid": 0, "ts": 0, "s": "g"},
        ]
        data = {"traceEvents": events, "baseTimeNanoseconds": 1_767_225_600 * 10**9 + 5 * 10**9}
        data |= {"distributedInfo": {"rank": rank, "world_size": 2, "backend": "nccl"}}
        paths.append(tmp_path / f"rank{rank}.json.gz")
        with gzip.open(paths[-1], "wt") as file:
            json.dump(data, file)
    traces = md.tracing.load(*reversed(paths))
    assert [(trace.rank, trace.window()) for trace in traces] == [(0, (5, 25)), (1, (5, 25))]
    calls = traces[0].of("communication")
    assert [e.name for e in calls] == ["all_reduce", "all_gather"]
    assert all((e.detail["group"], e.detail["In msg nelems"]) == ([0, 1], 7) for e in calls)
    found = md.tracing.breakdown(traces[0])
    assert [found.computing, found.overlapped, found.exposed] == pytest.approx([9, 3, 7])
    assert found.idle == pytest.approx(4) and found.hidden == pytest.approx(0.3)
    assert md.tracing.late(traces) == pytest.approx({0: -1.5, 1: 1.5})
    assert md.tracing.waits(traces)[0] == pytest.approx((0, 7))
    (tmp_path / "other.json").write_text('{"schemaVersion": 1}')
    with pytest.raises(ValueError, match="no trace, or was cut short"):
        md.tracing.load(tmp_path / "other.json")


# ---- recording --------------------------------------------------------------------------------


def batch(k, rows=4, width=64):
    """Other rows on each rank."""
    torch.manual_seed(10 * k + dist.get_rank())
    return torch.randn(rows, width)


def recorded(train, steps=3):
    """The trace of some steps, after two that are not in it: buckets and orders are found there."""
    for k in range(2):
        train(batch(k))
    dist.barrier()
    with md.tracing.record() as trace:
        for k in range(steps):
            with trace.step():
                train(batch(2 + k))
    return trace


def by_ddp(wrap, **options):
    model = wrap(md.zoo.mlp(64, 48, 10), **options)
    return recorded(lambda x: model(x).square().mean().backward())


def by_fully_shard():
    model = md.zoo.mlp(64, 48, 10)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return recorded(lambda x: model(x).square().mean().backward())


def by_pipeline():
    model = md.Pipeline(md.zoo.mlp(64, 48, 10), 3, balance=[1, 2])
    return recorded(lambda x: model.train_step(batch(0, 6), torch.ones(6, 10), F.mse_loss))


def by_features():
    first, last = md.ColumnParallelLinear(64, 32), md.RowParallelLinear(32, 64)

    def train(x):
        dist.broadcast(x, 0)  # the ranks of a layer see the same rows
        last(first(x.requires_grad_())).square().mean().backward()

    return recorded(train)


PASSES = [f"pipeline.{way}(0, {i})" for way in ("Forward", "Backward") for i in range(3)]
LAYERS = "ColumnParallelLinear", "RowParallelLinear", "ColumnLinear.backward"
EACH_STEP = {  # what rank 0 calls in a step, and its phases
    "ours": (
        partial(by_ddp, md.DistributedDataParallel, bucket_cap_mb=1e-5),  # a bucket a parameter
        {"all_reduce": 4},
        ["ddp.forward", "ddp.reduce 0", "ddp.reduce 3", "ddp.wait 3"],
    ),
    "torch's": (partial(by_ddp, TorchDDP), {"all_reduce": 1}, ["DistributedDataParallel.forward"]),
    "a ring": (partial(recorded, md.collectives.all_reduce), {"all_reduce": 1}, []),
    "fully_shard": (by_fully_shard, {"all_gather": 4, "reduce_scatter": 2}, []),
    "pipeline": (by_pipeline, {"isend": 3, "irecv": 3, "all_reduce": 1}, PASSES),
    "features": (
        by_features,
        {"broadcast": 1, "all_reduce": 2},
        [f"tensor_parallel.{each}" for each in LAYERS],
    ),
}


@pytest.mark.parametrize("strategy", EACH_STEP)
def test_what_a_step_communicates_is_recorded_once(pools, strategy):
    train, calls, phases = EACH_STEP[strategy]
    traces = pools(2)(train)
    assert [trace.rank for trace in traces] == [0, 1]
    for trace in traces:
        assert [e.name for e in trace.steps()] == [f"ProfilerStep#{k}" for k in range(3)]
        for one in trace.steps():
            # gloo's thread may note an end when the step is over.
            within = [e for e in trace.spans if one.start < e.start < one.end]
            assert Counter(e.name for e in within if e.category == "communication") == calls
            names = [e.name for e in within if e.category == "phase"]
            assert trace.rank or all(names.count(name) == 1 for name in phases)
            assert any(e.name.startswith("aten::") for e in within)
    windows = [trace.window() for trace in traces]
    took = max(end for _, end in windows) - min(start for start, _ in windows)
    path = md.tracing.critical_path(traces)
    assert sum(md.tracing.seconds_of(path).values()) == pytest.approx(took)


def test_a_call_finds_its_other_end(pools):
    """Of several calls for one pair of ranks, in two groups; after one for another pair."""

    def calls():
        rank, pair, other = dist.get_rank(), dist.new_group([0, 1]), dist.new_group([0, 2])
        with md.tracing.record() as trace, trace.step():
            for group in (other, pair):
                if rank in dist.get_process_group_ranks(group):
                    dist.all_reduce(torch.ones(1), group=group)
            for k, group in enumerate([None, pair, None, pair]):
                if rank == 0 and k % 3:
                    dist.isend(torch.ones(1 + k), 1, group).wait()
                elif rank == 0:
                    dist.send(torch.ones(1 + k), 1, group)
                elif rank == 1:
                    dist.recv(torch.ones(1 + k), 0, group)
        return trace

    traces = pools(3)(calls)
    assert md.tracing.waits(traces).keys() == {0, 1, 2}
    sent, received = (
        {(*e.detail["group"], e.detail["index"]): e.detail["nbytes"] for e in each}
        for each in ([e for e in t.spans if e.detail.get("peer") in (0, 1)] for t in traces[:2])
    )
    assert sent == received and len(sent) == 4


def test_what_torchs_ddp_averages_within_a_call_is_another():
    """Layers call all_to_all and all_reduce while gloo does these, and three for DDP."""
    calls = [call(2, 9, 0, "all_to_all"), call(10, 14, 0), call(11, 19, 0, kind="received")]
    of_gloo = [call(1, 3, 0), call(3, 5, 1), call(4, 6, 0, "all_to_all"), call(11, 13, 2)]
    of_gloo += [call(12, 13, 0, "recv", kind="message"), call(12, 15, 3), computes(3, 4)]
    assert joined(calls, of_gloo) == [*calls, *(of_gloo[k] for k in (0, 1, 5, 6))]
    two = [call(20, 30, 0), call(21, 23, 1)]  # gloo's threads begin with the second
    assert joined(two, [call(22, 23, 0), call(25, 29, 1)]) == two
    assert joined(two, kernels := [call(20, 25, 0, group=[0, 1])]) == kernels  # NCCL's


def test_one_profiler_at_a_time(pools):
    def both():
        with profile() as outer, pytest.raises(RuntimeError, match="a profiler is running"):
            with md.tracing.record():
                pass
        return len(outer.events()), record.active()

    def failed():
        with pytest.raises(KeyError), md.tracing.record():
            raise KeyError
        with md.tracing.record() as trace, trace.step():
            dist.barrier()
        return record.active(), [e.name for e in trace.steps()], len(trace.of("communication"))

    assert all(not active for _, active in pools(2)(both))
    assert pools(2)(failed) == [(False, ["ProfilerStep#0"], 1)] * 2


# ---- what a device could do -------------------------------------------------------------------


def test_the_operations_that_a_model_needs_are_those_counted():
    """But for the scores, which the backward pass of attention computes again: 2 LTC a token."""
    layers, width, length, batch = 3, 32, 16, 5
    model = md.zoo.Transformer(vocabulary=64, length=length, width=width, layers=layers)
    tokens = torch.randint(64, (batch, length))

    def train():
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()

    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)  # the head is tied
    in_products = matrices - model.positions.weight.numel()
    needed = md.tracing.model_flops(in_products, tokens.numel(), layers, width, length)
    again = 2 * layers * length * width * tokens.numel()
    assert md.measure.count_flops(train) == needed + again
    assert md.tracing.mfu(needed, 2.0, needed) == 0.5


def test_a_point_below_the_roof():
    a = torch.randn(32, 32)
    point = md.tracing.point("product", lambda: a @ a, nbytes=3 * a.nbytes)
    assert point.intensity == 2 * 32**3 / (3 * 4 * 32**2)
    assert point.speed == pytest.approx(2 * 32**3 / point.seconds)
    assert md.tracing.point("add", lambda: a + a, 3 * a.nbytes, a.numel()).intensity == 1 / 12
    assert min(md.tracing.product(16), md.tracing.bandwidth(0.1), point.seconds) > 0
