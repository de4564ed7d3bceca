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

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.profiler import profile, record_function

import minidist as md
from minidist.measure import Span, Timeline, record
from minidist.tracing import Event, Trace

COLLECTIVE = {"kind": "collective", "group": [], "peer": None, "nbytes": 8}


def computes(start, end, name="aten::mm"):
    return Event(name, "compute", start, end)


def call(start, end, index, name="all_reduce", **detail):
    detail = COLLECTIVE | {"index": index} | detail
    return Event(name, "communication", start, end, detail)


def message(kind, start, end, index, peer):
    return call(start, end, index, "isend", kind=kind, peer=peer, group=[0, 1, 2])


def step(start, end, number=0):
    return Event(f"ProfilerStep#{number}", "phase", start, end)


def spans_of(draw, count, longest=9):
    starts = [draw.randrange(60) for _ in range(count)]
    return [(start, start + draw.randrange(1, longest)) for start in starts]


def slices(spans):
    """The seconds of the grid in which one of these is under way."""
    return {second for start, end in spans for second in range(start, end)}


def during(events):
    return slices([(e.start, e.end) for e in events])


def busy(trace):
    own = [span for e in trace.of("communication") for span in e.detail.get("blocked", [])]
    return during(trace.of("compute")) - slices(own)


# ---- one rank's time --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_spans_as_sets_of_slices(seed):
    draw = random.Random(seed)
    a, b = (spans_of(draw, draw.randrange(8)) for _ in range(2))
    joined = md.tracing.union(a)
    assert slices(joined) == slices(a) and md.tracing.length(joined) == len(slices(a))
    assert all(end < start for (_, end), (start, _) in zip(joined, joined[1:], strict=False))
    shared = md.tracing.both(joined, md.tracing.union(b))
    assert slices(shared) == slices(a) & slices(b)


def drawn(draw, rank=0):
    """A trace of operations and calls at random, which overlap as they like."""
    spans = [computes(*span) for span in spans_of(draw, 8)]
    for index, (start, end) in enumerate(sorted(spans_of(draw, 6))):
        stood = [(start, draw.randrange(start, end + 1)), (end - 1, end)][: draw.randrange(3)]
        spans.append(call(start, end, index, blocked=stood))
    return Trace(rank, [step(5, 50), *spans])


@pytest.mark.parametrize("seed", range(20))
def test_breakdown_against_slices(seed):
    draw = random.Random(seed)
    trace = drawn(draw)
    for start, end in [(5, 50), (20, 31), (0, 80)]:
        found = md.tracing.breakdown(trace, start, end)
        window = set(range(start, end))
        own, sent = busy(trace) & window, during(trace.of("communication")) & window
        assert (found.step, found.computing) == (end - start, len(own))
        assert (found.overlapped, found.exposed) == (len(own & sent), len(sent - own))
        assert found.idle == len(window - own - sent)
        assert found.hidden == (len(own & sent) / len(sent) if sent else 1)
    strips = md.tracing.strips(trace)
    assert during(strips.of("compute")) == busy(trace) & set(range(5, 50))
    assert md.tracing.breakdown(trace).step == 45  # its steps


def nested(draw, start, end, depth=0):
    """Operations that call others."""
    while start < end and depth < 4:
        stop = draw.randrange(start, end) + 1
        if draw.random() < 0.6:
            yield computes(start, stop, draw.choice("abc"))
            yield from nested(draw, start, stop, depth + 1)
        start = stop


@pytest.mark.parametrize("seed", range(20))
def test_own_time_belongs_to_the_innermost(seed):
    events = list(nested(random.Random(seed), 0, 40))
    innermost = {second: e for e in events for second in range(e.start, e.end)}
    expected = Counter(e.name for e in innermost.values())
    found = md.tracing.by_name(Trace(0, events))
    assert {name: spent for name, spent in found.items() if spent} == dict(expected)
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_a_trace():
    trace = Trace(0, [computes(1, 2), step(1, 4), computes(4, 6), step(5, 9, 1)])
    assert [e.name for e in trace.steps()] == ["ProfilerStep#0", "ProfilerStep#1"]
    assert trace.window() == (1, 9)
    assert [e.end for e in trace.within(1, 6).spans] == [2, 4, 6]
    moved = trace.shifted(3)
    assert moved.window() == (4, 12) and trace.window() == (1, 9)
    whole = Trace(1, [call(2, 5, 0, blocked=[(2, 5)])]).shifted(-2)
    assert whole.window() == (0, 3) and busy(whole) == set()
    assert whole.spans[0].detail["blocked"] == [(0, 3)]
    with pytest.raises(ValueError, match="rank 3's trace is empty"):
        Trace(3).window()
    again = pickle.loads(pickle.dumps(trace))
    assert again == trace and isinstance(again.step(), record_function)


# ---- several ranks ----------------------------------------------------------------------------


def in_step(durations, transfer=2, loads=None, offsets=None):
    """Ranks that compute so many seconds before each all_reduce, which ends for all at once, when
    the last one has come and `transfer` has passed. loads: seconds of waiting for data before."""
    loads, calls = loads or {}, len(durations[0])
    traces = [Trace(rank, []) for rank in range(len(durations))]
    now = 0
    for k in range(calls):
        starts = []
        for trace, own in zip(traces, durations, strict=True):
            begins = now + loads.get(trace.rank, 0)
            starts.append(begins + own[k])
            trace.spans.append(computes(begins, starts[-1]))
        leaves = max(starts) + transfer
        for trace, start in zip(traces, starts, strict=True):
            trace.spans.append(call(start, leaves, k, blocked=[(start, leaves)]))
        now = leaves
    for trace in traces:
        trace.spans.append(step(0, now))
    return traces


def durations_of(draw, ranks=4, calls=6):
    return [[draw.randrange(10, 60) for _ in range(calls)] for _ in range(ranks)]


@pytest.mark.parametrize("seed", range(10))
def test_a_step_whose_critical_path_is_known(seed):
    durations = durations_of(random.Random(seed))
    traces = in_step(durations, transfer=3)
    last = [max(of) for of in zip(*durations, strict=True)]
    path = md.tracing.critical_path(traces)
    legs = [leg for leg in path if leg.end > leg.start]
    assert legs[0].start == 0 and legs[-1].end == sum(last) + 3 * 6
    assert all(one.end == other.start for one, other in zip(legs, legs[1:], strict=False))
    on_ranks = [(leg.rank, leg.end - leg.start) for leg in legs if leg.what == "rank"]
    for (rank, spent), own in zip(on_ranks, zip(*durations, strict=True), strict=True):
        assert own[rank] == spent == max(own)
    spent = md.tracing.seconds_of(path)
    assert spent["messages"] == 18 and sum(spent.values()) == legs[-1].end
    for rank, found in md.tracing.waits(traces).items():
        assert found.transfer == 18
        assert found.others == sum(last) - sum(durations[rank])


def test_what_computing_hides_is_not_on_the_path():
    def hidden(rank, *more):
        return Trace(rank, [step(0, 12), computes(0, 10), call(2, 6, 0), *more])

    (leg,) = [each for each in md.tracing.critical_path([hidden(0), hidden(1)]) if each.name == ""]
    assert (leg.what, leg.start, leg.end) == ("rank", 0, 12)


def test_the_path_of_messages():
    """Rank 0 computes for 3 and sends, rank 1 for 4 and sends back, 1 each on the way; rank 2 is
    done soon."""
    there, back = message("sent", 3, 3, 0, 1), message("received", 0, 4, 0, 0)
    first = [computes(0, 3), there, message("received", 3, 9, 0, 1), computes(9, 11)]
    second = [back, computes(4, 8), message("sent", 8, 9, 0, 0)]
    spans = [first, second, [computes(0, 5)]]
    traces = [Trace(rank, [step(0, 11), *each]) for rank, each in enumerate(spans)]
    assert [leg[:4] for leg in md.tracing.critical_path(traces)] == [
        *[("rank", 0, 0, 3), ("message", 1, 3, 4), ("rank", 1, 4, 8)],
        *[("message", 0, 8, 9), ("rank", 0, 9, 11)],
    ]
    found = md.tracing.waits(traces)
    assert [tuple(found[rank]) for rank in range(3)] == [(5, 1), (3, 1), (0, 0)]
    with pytest.raises(ValueError, match="see their critical_path"):
        md.tracing.cause(traces)


@pytest.mark.parametrize("seed", range(20))
def test_waits_against_slices(seed):
    """Calls that overlap each other and computing."""
    draw = random.Random(seed)
    traces = [Trace(rank, [step(0, 80), *map(computes_at, spans_of(draw, 6))]) for rank in range(3)]
    lasts = []
    for k in range(5):
        starts = [draw.randrange(12 * k, 12 * k + 9) for _ in traces]
        lasts.append(max(starts))
        for trace, start in zip(traces, starts, strict=True):
            trace.spans.append(call(start, lasts[k] + draw.randrange(1, 5), k))
    found = md.tracing.waits(traces)
    for trace in traces:
        calls = trace.of("communication")
        exposed = during(calls) - busy(trace)
        moving = {s for e in calls for s in range(lasts[e.detail["index"]], e.end)} - busy(trace)
        assert found[trace.rank] == (len(exposed - moving), len(moving))
        whole = md.tracing.breakdown(trace).exposed
        assert sum(found[trace.rank]) == whole


def computes_at(span):
    return computes(*span)


@pytest.mark.parametrize("slow", range(4))
def test_the_late_rank_and_why(slow):
    draw = random.Random(slow)
    even = [[100 + draw.randrange(5) for _ in range(6)] for _ in range(4)]
    double = [[each * (1 + (rank == slow)) for each in own] for rank, own in enumerate(even)]
    why, rank, seconds = md.tracing.cause(in_step(double))
    assert (why, rank) == ("slow device", slow) and 95 <= seconds <= 105
    lateness = md.tracing.late(in_step(double))
    assert seconds == lateness[slow] and all(lateness[r] < 5 for r in range(4) if r != slow)
    assert md.tracing.cause(in_step(even, loads={slow: 90}))[:2] == ("slow loader", slow)
    assert md.tracing.cause(in_step(even)) == ("nobody", None, 0.0)
    # The slow one communicates least; and what it waits for is no other rank.
    parts = {t.rank: md.tracing.breakdown(t).exposed for t in in_step(double)}
    others = {rank: each.others for rank, each in md.tracing.waits(in_step(double)).items()}
    assert min(parts, key=parts.get) == min(others, key=others.get) == slow
    assert others[slow] == 0


@pytest.mark.parametrize("seed", range(10))
def test_clocks_are_found_again(seed):
    draw = random.Random(seed)
    traces = in_step(durations_of(draw), draw.randrange(1, 4))
    shifts = [0, *(draw.randrange(-500, 500) for _ in traces[1:])]
    moved = [trace.shifted(by) for trace, by in zip(traces, shifts, strict=True)]
    aligned = md.tracing.align(moved)
    first = moved[0].of("communication")
    for trace, by, back in zip(moved, shifts, aligned, strict=True):
        if not trace.rank:
            continue
        low, high = md.tracing.offset(trace, moved[0])
        pairs = list(zip(trace.of("communication"), first, strict=True))
        fits = [
            by_much
            for by_much in range(-700, 701)
            if all(a.end + by_much >= b.start and b.end >= a.start + by_much for a, b in pairs)
        ]
        assert (low, high) == (fits[0], fits[-1]) and low <= -by <= high
        error = back.spans[0].start - traces[trace.rank].spans[0].start
        assert abs(error) <= (high - low) / 2
    for trace in moved[1].of("communication")[3:]:  # somebody sets the clock meanwhile
        object.__setattr__(trace, "start", trace.start + 2000)
        object.__setattr__(trace, "end", trace.end + 2000)
    with pytest.raises(ValueError, match="no offset fits"):
        md.tracing.offset(moved[1], moved[0])


def of_other_steps():
    one, two = in_step([[3], [4]])
    return [one, Trace(1, [*two.spans, step(20, 30, 1)])]


def cut_short():
    one, two = in_step([[3, 4, 5], [4, 4, 4]])
    return [one, Trace(1, two.spans[:-3] + two.spans[-1:])]


BAD = {
    "of one rank": (lambda: in_step([[3], [4]])[:1], "takes a trace of each rank"),
    "one rank twice": (lambda: in_step([[3], [4]])[:1] * 2, r"these are of \[0, 0\]"),
    "other steps": (of_other_steps, r"rank 1 \['ProfilerStep#0', 'ProfilerStep#1'\]"),
    "cut short": (cut_short, "all_reduce by rank: {0: 3, 1: 2}. One of the traces is cut short"),
    "silent": (lambda: [Trace(r, [computes(0, 1), step(0, 1)]) for r in (0, 1)], "no communic"),
}


@pytest.mark.parametrize("case", BAD)
def test_traces_that_say_nothing_together(case):
    make, words = BAD[case]
    for analysis in ("late", "waits", "critical_path", "cause"):
        with pytest.raises(ValueError, match=words):
            getattr(md.tracing, analysis)(make())


@pytest.mark.parametrize("by", [-50, 50])
def test_traces_on_other_clocks(by):
    def moved():
        one, two = in_step([[3], [4]])
        return [one, two.shifted(by)]

    for analysis in ("late", "waits", "critical_path", "cause"):
        with pytest.raises(ValueError, match=r"one clock by md\.tracing\.align"):
            getattr(md.tracing, analysis)(moved())
    assert md.tracing.waits(md.tracing.align(moved()))


# ---- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["traces.json", "traces.json.gz"])
def test_a_file_of_all_ranks(name, tmp_path):
    draw, path = random.Random(0), tmp_path / name
    traces = [drawn(draw, rank).shifted(1e7 + 1e-9) for rank in range(3)]
    traces[0].spans.append(message("sent", 1e7, 1e7 + 1, 0, 1))
    traces[1].spans.append(message("received", 1e7, 1e7 + 2, 0, 0))
    md.tracing.save(traces, path)
    found = md.tracing.load(path)
    assert [trace.rank for trace in found] == [0, 1, 2]
    for trace, other in zip(traces, found, strict=True):
        for own, e in zip(sorted(trace.spans, key=order), other.spans, strict=True):
            assert (own.name, own.category) == (e.name, e.category)
            assert json.loads(json.dumps(own.detail)) == e.detail
            assert abs(own.start - e.start) < 2e-9 and abs(own.end - e.end) < 2e-9
    written = read(path)["traceEvents"]
    assert md.tracing.validate(path) == len(written)
    put, got = [e for e in written if e["ph"] in "sf"]
    assert (put["pid"], got["pid"], put["id"] == got["id"]) == (0, 1, True)
    assert got["ts"] - put["ts"] == pytest.approx(2e6)
    for change, words in BROKEN.items():
        events = [dict(e) for e in written]
        broken = [e for e in events if change(e) is not True]
        (tmp_path / "broken.json").write_text(json.dumps({"traceEvents": broken}))
        with pytest.raises(ValueError, match=words):
            md.tracing.validate(tmp_path / "broken.json")
    (tmp_path / name).write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match=f"{name} is no trace, or was cut short"):
        md.tracing.load(path)


BROKEN = {  # True: the event is left out
    (lambda e: e.update(tid=0)): "overlap in the row",
    (lambda e: e["ph"] == "f"): "one end",
    (lambda e: e.pop("pid")): "lacks pid",
    (lambda e: "dur" in e and e.update(dur=-1)): "lacks a time",
}


def order(e):
    return e.start, -e.end


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


def nccl(start, end, name, ranks):
    args = {"Collective name": name, "Process Group Ranks": str(ranks), "In msg nelems": 7}
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
            nccl(6 + late, 11 + late if late else 14, "allreduce", [0, 1]),
            written("vectorized_elementwise", "kernel", 15, 16),
            nccl(16, 18, "_allgather_base", [0, 1]),
            {"ph": "i", "name": "Iteration Start", "pid": 0, "tid": 0, "ts": 0, "s": "g"},
        ]
        data = {"traceEvents": events, "baseTimeNanoseconds": 1_767_225_600 * 10**9 + 5 * 10**9}
        data |= {"distributedInfo": {"rank": rank, "world_size": 2, "backend": "nccl"}}
        paths.append(tmp_path / f"rank{rank}.json.gz")
        with gzip.open(paths[-1], "wt") as file:
            json.dump(data, file)
    traces = md.tracing.load(*reversed(paths))
    assert [trace.rank for trace in traces] == [0, 1]
    assert [trace.window() for trace in traces] == [(5, 25)] * 2
    calls = traces[0].of("communication")
    assert [(e.name, e.detail["group"], e.detail["index"]) for e in calls] == [
        ("all_reduce", [0, 1], 0),
        ("all_gather", [0, 1], 0),
    ]
    assert calls[0].detail["In msg nelems"] == 7
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


EACH_STEP = {  # what rank 0 calls in a step, and its phases
    "ours": (
        partial(by_ddp, md.DistributedDataParallel, bucket_cap_mb=1e-5),  # a bucket a parameter
        {("all_reduce", "collective"): 4},
        {"ddp.forward": 1, "ddp.reduce 0": 1, "ddp.reduce 3": 1, "ddp.wait 3": 1},
    ),
    "torch's": (
        partial(by_ddp, TorchDDP),
        {("all_reduce", "collective"): 1},
        {"DistributedDataParallel.forward": 1},
    ),
    "fully_shard": (
        by_fully_shard,
        {("all_gather", "collective"): 4, ("reduce_scatter", "collective"): 2},
        {},
    ),
    "pipeline": (
        by_pipeline,
        {("isend", "sent"): 3, ("irecv", "received"): 3, ("all_reduce", "collective"): 1},
        {f"pipeline.{way}(0, {i})": 1 for way in ("Forward", "Backward") for i in range(3)},
    ),
    "features": (
        by_features,
        {("broadcast", "collective"): 1, ("all_reduce", "collective"): 2},
        {
            "tensor_parallel.ColumnParallelLinear": 1,
            "tensor_parallel.RowParallelLinear": 1,
            "tensor_parallel.ColumnLinear.backward": 1,
        },
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
            sent = [e for e in within if e.category == "communication"]
            assert Counter((e.name, e.detail["kind"]) for e in sent) == calls
            names = Counter(e.name for e in within if e.category == "phase")
            if not trace.rank:
                assert {name: names[name] for name in phases} == phases
            assert any(e.name.startswith("aten::") for e in within)
    start, end = (edge(trace.window()[i] for trace in traces) for i, edge in ((0, min), (1, max)))
    path = md.tracing.critical_path(traces)
    assert sum(md.tracing.seconds_of(path).values()) == pytest.approx(end - start)
    for trace, waited in zip(traces, md.tracing.waits(traces).values(), strict=True):
        exposed = md.tracing.breakdown(trace, start, end).exposed
        assert 0 <= waited.transfer <= exposed + 1e-9


def test_a_message_finds_its_other_end(pools):
    """Of several calls for one pair of ranks, in two groups."""

    def calls():
        rank, pair = dist.get_rank(), dist.new_group([0, 1])
        with md.tracing.record() as trace, trace.step():
            for k, group in enumerate([None, pair, None, pair]):
                if rank == 0:
                    work = dist.isend(torch.ones(1 + k), 1, group) if k % 3 else None
                    work.wait() if work else dist.send(torch.ones(1 + k), 1, group)
                elif rank == 1:
                    dist.recv(torch.ones(1 + k), 0, group)
        return trace

    traces = pools(3)(calls)
    sent, received, nothing = (trace.of("communication") for trace in traces)
    assert not nothing and len(sent) == len(received) == 4
    ends = {(*e.detail["group"], e.detail["index"]): e.detail["nbytes"] for e in sent}
    for e in received:
        assert ends[*e.detail["group"], e.detail["index"]] == e.detail["nbytes"]


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
