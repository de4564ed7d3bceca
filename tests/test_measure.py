"""The meters: what is counted, when, and that nothing of them stays behind."""

import math
import os
import pickle
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minidist as md
from minidist.instruments.measure import Span, Timeline, TrafficCounter, count_flops, record

KINDS = ["send", "recv", "isend", "irecv", "batch_isend_irecv", "all_reduce", "barrier", "P2POp"]


def _round_trip(way: str) -> TrafficCounter:
    """Every rank sends 3 float32 to the right, and one more for its rank."""
    r, p = dist.get_rank(), dist.get_world_size()
    right, left = (r + 1) % p, (r - 1) % p
    outgoing, incoming = torch.full((3 + r,), float(r)), torch.zeros(3 + left)
    with TrafficCounter() as counter:
        if way == "isend, recv":
            work = dist.isend(outgoing, right)
            dist.recv(incoming, left)
            work.wait()
        elif way == "send, irecv":
            work = dist.irecv(tensor=incoming, src=left)
            dist.send(outgoing, dst=right, tag=0)
            assert isinstance(work, dist.Work) and work.wait()
            assert work.is_completed()
        elif way == "batch":
            operations = [dist.P2POp(dist.irecv, incoming, left)]
            operations.append(dist.P2POp(op=dist.isend, tensor=outgoing, peer=right))
            for work in dist.batch_isend_irecv(operations):
                work.wait()
    assert incoming.tolist() == [float(left)] * (3 + left)
    dist.barrier()
    return counter


def test_messages_are_counted(pools):
    for way in "isend, recv", "send, irecv", "batch":
        counters = pools(3)(_round_trip, way)
        for r, counter in enumerate(counters):
            right = (r + 1) % 3
            assert (counter.rank, counter.world_size) == (r, 3)
            assert (counter.sent_messages, counter.sent_bytes) == (1, 4 * (3 + r)), way
            assert counter.sent_to == [4 * (3 + r) * (other == right) for other in range(3)]
            assert (counter.control_bytes, counter.control_messages) == (0, 0), way
            assert counter.calls == {}, way


def test_bytes_are_told_apart_by_group_and_peers_are_those_of_the_world(pools):
    def in_two_groups() -> tuple[dict, list]:
        group, r = dist.new_group([1, 2]), dist.get_rank()
        with TrafficCounter() as counter:
            dist.all_reduce(torch.ones(3))
            if r == 1:
                dist.send(torch.ones(5), group=group, group_dst=1)
            elif r == 2:
                dist.recv(torch.ones(5), group=group, group_src=0)
            if r:
                dist.all_reduce(torch.ones(2), group=group)
                dist.all_reduce(torch.ones(2), group=group)
            md.collectives.barrier()  # its agreement is left out; its messages have a byte
        if r:
            dist.destroy_process_group(group)
        dist.barrier()
        return counter.by_group, counter.sent_to

    everyone = {"all_reduce": (1, 12)}
    (first, _), (second, sent), (third, _) = pools(3)(in_two_groups)
    assert sent == [1, 0, 20 + 1]  # and the bytes of the barrier
    assert first[0, 1, 2].items() >= everyone.items() and len(first) == 1
    assert second[1, 2] == {"send": (1, 20), "all_reduce": (2, 16)}
    assert third[1, 2] == {"all_reduce": (2, 16)}


def _collectives_of_torch() -> dict[str, tuple[int, int]]:
    r, p = dist.get_rank(), dist.get_world_size()
    x = torch.ones(6)  # 24 bytes
    with TrafficCounter() as counter:
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.broadcast(x, 0)
        dist.reduce(x, dst=1)
        dist.all_gather([torch.ones(6) for _ in range(p)], x)
        dist.all_gather_into_tensor(torch.ones(6 * p), x)
        dist.reduce_scatter_tensor(torch.ones(6 // p), x)
        dist.gather(x, [torch.ones(6) for _ in range(p)] if r == 0 else None)
        dist.scatter(x, [torch.ones(6) for _ in range(p)] if r == 0 else None)
        dist.all_to_all([torch.ones(3) for _ in range(p)], [torch.ones(3) for _ in range(p)])
        dist.barrier()
    assert counter.sent_bytes == counter.control_bytes == 0
    assert repr(counter).startswith(f"TrafficCounter(rank {r} of {p}: sent 0 bytes")
    return counter.calls


def test_collectives_of_torch_are_counted_whole(pools):
    for calls in pools(2)(_collectives_of_torch):
        assert calls == {
            "all_reduce": (2, 48),
            "broadcast": (1, 24),
            "reduce": (1, 24),
            "all_gather": (2, 96),  # from a list and from one tensor
            "reduce_scatter": (1, 24),
            "gather": (1, 48),
            "scatter": (1, 48),
            "all_to_all": (1, 24),
            "barrier": (1, 0),
        }


def calls_as_rings(n):
    with TrafficCounter() as traffic:
        dist.all_reduce(torch.zeros(n))
        dist.reduce_scatter_single(torch.zeros(n // dist.get_world_size()), torch.zeros(n))
    sent = md.collectives.sent_as_rings(traffic.calls | {"all_gather": (1, 4 * n)})
    with pytest.raises(ValueError, match="broadcast is no ring"):
        md.collectives.sent_as_rings({"broadcast": (1, 4)})
    return sent


def test_collectives_are_run_as_rings(pools):
    """All_reduce sends 2 (N - 1)/N of its vector, its halves one each."""
    for N in 2, 3:
        assert pools(N)(calls_as_rings, 60) == [4 * (N - 1) / N * 4 * 60] * N


def test_what_torch_calls_by_itself_is_counted_once(pools):
    def objects() -> list:
        r = dist.get_rank()
        with TrafficCounter() as gathered:
            found: list = [None, None]
            dist.all_gather_object(found, {"rank": r})
        with TrafficCounter() as passed:
            box = ["hello"] if r == 0 else [None]
            dist.send_object_list(box, 1) if r == 0 else dist.recv_object_list(box, 0)
        assert found == [{"rank": 0}, {"rank": 1}] and box == ["hello"]
        return [{name: calls for name, (calls, _) in gathered.calls.items()}, passed.sent_messages]

    # The sizes and the pickles: two messages.
    assert pools(2)(objects) == [[{"all_gather": 2}, 2], [{"all_gather": 2}, 0]]


def _left_behind() -> list[str]:
    wrong: list[str] = []
    places = [(module, name) for module in (dist, c10d) for name in KINDS]
    places.append((dist.P2POp, "__init__"))
    before = [getattr(*place) for place in places]

    def check(when: str) -> None:
        wrong.extend(
            f"{name} {when}"
            for (module, name), function in zip(places, before, strict=True)
            if getattr(module, name) is not function
        )

    with TrafficCounter() as outer:
        if dist.send is before[0]:
            wrong.append("send is not watched")
        with Timeline() as inner:
            dist.barrier()
        with TrafficCounter():
            pass
        dist.barrier()
    check("after two that were nested")
    if (outer.calls, len(inner.spans)) != ({"barrier": (2, 0)}, 1):
        wrong.append("nested meters")
    try:
        with TrafficCounter() as counter:
            dist.barrier()
            raise KeyError
    except KeyError:
        check("after an exception")
    if counter.calls != {"barrier": (1, 0)}:
        wrong.append("no count after an exception")
    return wrong


def test_torch_is_left_as_it_was(pools):
    assert pools(2)(_left_behind) == [[], []]


def test_the_agreement_is_counted_apart(pools):
    def one_call() -> TrafficCounter:
        with TrafficCounter() as counter:
            md.collectives.all_reduce(torch.ones(8), algorithm="naive")
        return counter

    root, *others = pools(3)(one_call)
    assert (root.sent_bytes, root.sent_messages) == (2 * 32, 2)
    assert all((one.sent_bytes, one.sent_messages) == (32, 1) for one in others)
    # Headers of 16 bytes. The tree: 0 -> 1 and 0 -> 2.
    assert [c.control_messages for c in (root, *others)] == [2, 1, 1]
    assert [c.control_bytes for c in (root, *others)] == [32, 16, 16]
    assert [c.sent_to for c in (root, *others)] == [[0, 32, 32], *[[32, 0, 0]] * 2]


def test_meters_are_plain_data(pools):
    meters = pools(2)(lambda: [TrafficCounter(), Timeline()])[0]
    for meter in meters:
        copy = pickle.loads(pickle.dumps(meter))
        assert vars(copy) == vars(meter)
        with meter, pytest.raises(RuntimeError, match="already"):
            meter.__enter__()


# ---- timelines ----------------------------------------------------------------------------------


def _a_step() -> Timeline:
    r = dist.get_rank()
    with Timeline() as timeline:
        with timeline.span("forward"):
            time.sleep(0.02 + 0.1 * r)  # rank 1 is late
        md.collectives.all_reduce(torch.ones(1000))
        with timeline.span("step", category="optimizer"):
            pass
        dist.barrier()
    return timeline


def test_a_timeline_shows_a_collective_as_one_span(pools):
    timelines = pools(2)(_a_step)
    for r, timeline in enumerate(timelines):
        assert timeline.rank == r
        assert [(span.name, span.category) for span in timeline.spans] == [
            ("forward", "compute"),
            ("agreement", "agreement"),
            ("all_reduce", "communication"),
            ("step", "optimizer"),
            ("barrier", "communication"),
        ]
        for span, following in zip(timeline.spans, timeline.spans[1:], strict=False):
            assert span.start <= span.end <= following.start
    early, late = timelines  # the clock is one for both
    assert early.spans[1].end > late.spans[0].end  # the early rank waits in the agreement


def test_an_asynchronous_call_lasts_until_it_is_done_a_message_of_gloo_until_its_wait(pools):
    def overlap() -> tuple[str, list[Span]]:
        r = dist.get_rank()
        with Timeline() as timeline:
            message = dist.irecv(torch.ones(1), 1) if r == 0 else dist.isend(torch.ones(1), 0)
            whole = dist.all_reduce(torch.ones(1), async_op=True)
            with timeline.span("backward"):
                while not whole.is_completed():
                    time.sleep(0.01)
                time.sleep(0.1)  # until that is noted
            message.wait()
            whole.wait()
            with timeline.span("pause"):
                pass
            whole.wait()  # once more changes nothing
            future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
            assert future.wait()[0].item() == 2
            forgotten = dist.all_reduce(torch.ones(1), async_op=True)
        forgotten.wait()
        return dist.get_backend(), timeline.spans

    for (backend, spans), name in zip(pools(2)(overlap), ("irecv", "isend"), strict=True):
        names = [span.name for span in spans]
        assert names == [name, "all_reduce", "backward", "pause", "all_reduce", "all_reduce"]
        message, whole, backward, pause, by_future, forgotten = spans
        assert message.start < backward.start and whole.start < backward.start
        if backend == "gloo":
            assert backward.end < message.end < pause.start
        else:
            assert message.end < backward.end
        assert whole.start < whole.end < backward.end
        assert pause.end < by_future.start < by_future.end
        assert forgotten.end >= forgotten.start


def test_the_record_says_when_the_caller_stood_still(pools):
    def calls():
        right, moments = (dist.get_rank() + 1) % 2, []
        with record.observed() as events:
            dist.all_reduce(torch.ones(8))
            moments.append(time.perf_counter())
            works = [dist.all_reduce(torch.ones(8), async_op=True)]
            works += [dist.irecv(torch.ones(1), right), dist.isend(torch.ones(1), right)]
            moments.append(time.perf_counter())
            for work in works:
                work.wait()
            moments.append(time.perf_counter())
        return events, moments

    for (whole, *others), (first, between, last) in pools(2)(calls):
        ((start, end),) = whole.blocked
        assert whole.start == start < end < first
        assert len(others) == 3
        for event in others:
            (call, left), (waits, came) = event.blocked
            assert event.start == call < left < between < waits < came < last


# ---- calls that torch makes in C++ ----------------------------------------------------------


def _ddp_step() -> tuple[dict, list[Span], int]:
    model = TorchDDP(nn.Linear(300, 10), bucket_cap_mb=0.005)
    inputs = torch.ones(4, 300) * dist.get_rank()
    for _ in range(2):  # then the buckets are as they stay
        model(inputs).sum().backward()
    with TrafficCounter() as traffic, Timeline() as timeline:
        model(inputs).sum().backward()
    assert traffic.by_group == {(0, 1): traffic.calls}
    return traffic.calls, timeline.spans, sum(p.nbytes for p in model.parameters())


def _calls_by_imported_names() -> tuple[dict, int]:
    from torch.distributed import all_gather_into_tensor, irecv, isend

    r, x, group = dist.get_rank(), torch.ones(3), dist.new_group([1, 0])
    with TrafficCounter() as traffic:
        all_gather_into_tensor(torch.empty(6), x)
        work = isend(x, 1) if r == 0 else irecv(x)
        work.wait()
        group.allreduce([x]).wait()
    return traffic.calls, traffic.sent_bytes


def test_on_shm_calls_that_torch_makes_in_c_or_by_an_imported_name_are_recorded_once():
    with md.ranks(2, backend="shm") as pool:
        for calls, spans, nbytes in pool(_ddp_step):
            assert calls == {"all_reduce": (len(spans), nbytes)}
            for span in spans:
                assert (span.name, span.category) == ("all_reduce", "communication")
                assert span.start < span.end
        told = {"all_gather": (1, 24), "all_reduce": (1, 12)}
        assert pool(_calls_by_imported_names) == [(told, 12), (told, 0)]


def test_arithmetic_is_that_of_products_and_of_attention():
    a, b = torch.rand(3, 5), torch.rand(5, 7)
    assert count_flops(torch.mm, a, b) == 2 * 3 * 5 * 7
    q = torch.rand(2, 4, 6, 8, requires_grad=True)  # (B, H, T, C / H)
    product = 2 * 2 * 4 * 6 * 6 * 8
    attention = torch.nn.functional.scaled_dot_product_attention
    assert count_flops(attention, q, q, q) == 2 * product
    # Backward has five products: it computes the scores again.
    assert count_flops(lambda: attention(q, q, q).sum().backward()) == 7 * product
    shared = torch.rand(2, 2, 6, 8)  # two heads of queries have the same keys
    assert count_flops(lambda: attention(q, shared, shared, enable_gqa=True)) == 2 * product


# ---- copies within a process ----------------------------------------------------------------


def test_copies_are_counted_by_their_bytes():
    x, counter = torch.ones(10), md.measure.CopyCounter()
    with counter:
        x.clone(), x.double(), x.to("cpu"), torch.cat([x, x]), x[:5] + 1
    x.clone()
    assert counter.nbytes == 40 + 80  # to("cpu") had nothing to copy


# ---- messages there and back --------------------------------------------------------------


def test_a_ping_pong_times_every_size_on_rank_0_and_leaves_no_message(pools):
    def twice():
        with md.measure.TrafficCounter() as traffic:
            first = md.measure.ping_pong([1, 4096], repeats=3)
        left = torch.full((1,), float(dist.get_rank()))
        dist.broadcast(left, src=2)
        return first, left.item(), (traffic.sent_messages, traffic.sent_bytes)

    results = pools(3)(twice)
    samples = results[0][0]
    assert [nbytes for nbytes, _ in samples] == [1, 4096] * 3
    assert all(seconds > 0 for _, seconds in samples)
    assert len(results[1][0]) == 6 and results[2][0] == []
    assert [left for _, left, _ in results] == [2.0] * 3
    # Four rounds of two sizes; before each message goes a byte, so that none is the first of all.
    sent = (4 * 2 * 2, 4 * (1 + 1 + 1 + 4096))
    assert [counted for *_, counted in results] == [sent, sent, (0, 0)]


def test_a_fit_finds_the_line_and_medians_and_the_fastest_are_by_size():
    alpha, beta = 2e-5, 3e-10
    line = [(n, alpha + n * beta) for n in (1, 1_000, 1_000_000)]
    late = [(n, 10 * seconds) for n, seconds in line]
    samples = [*line, *late, *line]
    assert md.measure.fit(samples) == pytest.approx((alpha, beta))
    assert md.measure.medians(samples) == md.measure.fastest(samples) == dict(line)
    assert md.measure.medians(samples + 3 * late) == dict(late)
    assert md.measure.fastest(samples + 3 * late) == dict(line)


def test_two_lines_cross_between_the_sizes_where_they_change_places():
    first = {10: 1.0, 20: 2.0, 30: 6.0}
    assert md.measure.crossing(first, {30: 4.0, 20: 4.0, 10: 4.0}) == 25
    assert math.isnan(md.measure.crossing(first, {nbytes: 9.0 for nbytes in first}))


def test_together_waits_for_the_last_rank(pools):
    def late():
        return md.measure.together(time.sleep, 0.05 * dist.get_rank(), rounds=2)

    first, *others = pools(3)(late)
    assert others == [first, first] and 0.1 <= first < 1


def test_ranks_can_be_tied_to_cores(pools):
    def tied():
        before = os.sched_getaffinity(0)
        try:
            return md.measure.tie_to_cores(1), len(os.sched_getaffinity(0))
        finally:
            os.sched_setaffinity(0, before)

    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("no affinity here")
    assert pools(2)(tied) == [(True, 1)] * 2


def test_the_seconds_of_a_timeline():
    timeline = Timeline()
    spans = enumerate([("step", "compute"), ("send", "x")] * 3)
    timeline.spans = [Span(name, kind, float(at), float(at + 1)) for at, (name, kind) in spans]
    assert timeline.seconds() == {"compute": 3.0, "x": 3.0}


def test_who_comes_early_waits():
    def late() -> Timeline:
        r, x = dist.get_rank(), torch.ones(1)
        with Timeline() as timeline:
            time.sleep(0.1 * r)
            dist.all_reduce(x)
            if r == 1:
                dist.recv(x, 0)
                time.sleep(0.1)
            else:
                time.sleep(0.1)
                dist.send(x, 1)  # a short one: it is gone before rank 1 asks for the next
                dist.send(x, 1)
            if r == 1:
                dist.recv(x, 0)
        return timeline

    lines = md.measure.waiting(launched := md.launch(late, world_size=2, backend="shm"))
    found = [[span.name for span in line.spans] for line in lines]
    assert found == [
        ["waiting", "all_reduce", "send", "send"],
        ["all_reduce", "waiting", "recv", "recv"],
    ]
    for line, whole in zip(lines, launched, strict=True):
        assert sum(line.seconds().values()) == pytest.approx(sum(whole.seconds().values()))
        assert line.seconds()["waiting"] > 0.05


def test_cores_at_work_are_those_of_threads_that_compute():
    assert md.measure.cores_at_work(time.sleep, [0.05, 0.05], rounds=2) < 0.5
    assert 0.3 < md.measure.cores_at_work(sum, [range(10**6)] * 2) < 1.5  # the GIL


class _Ends(nn.Module):
    """Averages once, after backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def finish(self) -> None:
        for parameter in self.parameters():
            dist.all_reduce(parameter.grad)


def test_steps_of_several_ways_are_timelines_of_all_ranks(monkeypatch) -> None:
    monkeypatch.setenv("MINIDIST_TIMING", "soft")  # one round
    data = md.zoo.digits()
    with md.ranks(2) as two:
        of = md.measure.step_timelines(two, _network, {"ends": _Ends}, *(d[:8] for d in data))
    assert list(of) == ["computing alone", "ends"]
    for way, step in of.items():
        assert [timeline.rank for timeline in step] == [0, 1]
        for timeline in step:
            names = [span.name for span in timeline.spans if span.category == "step"]
            assert names == ["forward", "backward", "waiting"]
            sent = [span for span in timeline.spans if span.category == "communication"]
            assert len(sent) == (4 if way == "ends" else 0)
            (waiting,) = [span for span in timeline.spans if span.name == "waiting"]
            assert all(waiting.start < span.start < waiting.end for span in sent)
        seconds = [timeline.seconds()["step"] for timeline in step]
        assert md.measure.step_seconds(step) == max(seconds)


def _network() -> nn.Module:
    return md.zoo.mlp(64, 8, 10)
