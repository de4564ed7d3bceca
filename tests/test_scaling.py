"""A rank of a thousand, alone; what the planner says of it; and how often to save."""

import math
import statistics
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from programs import few
from torch import nn

import minidist as md
from minidist.fully_sharded import by_class
from minidist.instruments import planner, scaling
from minidist.instruments.planner.peak import peaks
from minidist.instruments.scaling import pipelines
from minidist.instruments.scaling.chain import PLAN, Chain
from minidist.instruments.scaling.llama_shape import plan_of

LLAMA = planner.MODELS["llama-3-8b"]
SMALL = planner.Transformer(4, 64, 8, 16, 96, 2, 96, llama=True, tied=False)
FSDP = planner.Layout(1024, stage=3)
LAYOUTS = {  # of 1,024 ranks, and how exact numbers are
    "FSDP": (FSDP, "autocast"),
    "FSDP, two micro-batches": (replace(FSDP, micro_batches=2), "bfloat16"),
    "sequence parallel": (
        planner.Layout(1024, 8, micro_batches=2, sequence_parallel=True),
        "bfloat16",
    ),
    "data × pipeline × tensor": (
        planner.Layout(1024, 8, 8, micro_batches=16, sequence_parallel=True),
        "bfloat16",
    ),
    "replicas, two micro-batches": (planner.Layout(1024, micro_batches=2), "float32"),
    "FSDP × tensor": (planner.Layout(1024, 8, stage=3), "autocast"),
    "FSDP × pipeline": (planner.Layout(1024, 1, 4, stage=3, micro_batches=4), "autocast"),
}


def planned_bytes(shape, layout, precision):
    counts = Counter()
    for operation, nbytes, ranks, times, _ in planner.messages(shape, layout, precision):
        counts[operation, ranks] += nbytes * times
    return dict(counts)


def kept_of_loss_and_small(shape, layout, precision):
    """Bytes that the planner's activations leave out: what norms and flash attention keep beside
    their tensors; and what backward keeps of the loss, which it counts with the logits."""
    stage = planner.layout.stages(shape, layout)[0]
    t, c = layout.tensor, 4 if precision == "float32" else 2
    T = layout.micro_batch * shape.length
    of_norms = T // t if layout.sequence_parallel else T  # tokens that a norm sees
    flash = 4 * shape.heads * layout.micro_batch * shape.length // t + 24  # sums; two random states
    layer = 2 * 4 * of_norms + flash
    small = layout.in_flight(0) * stage.layers * layer
    if t > 1:  # which of the embedding's words are whose, and their numbers
        small += int(layout.in_flight(0) * 9 * T)
    if stage.last:
        inputs = 2 * c * shape.width * of_norms
        small += inputs + 4 * of_norms + 4 * T * shape.vocabulary // t
        # How many tokens count. Where ranks share the vocabulary, also which ones do, and of each
        # target here its row and its column: without numbers, every target is here.
        small += 8 + (1 + 8 + 8) * T if t > 1 else 4
    return small


BY_DAY = {"FSDP, two micro-batches", "data × pipeline × tensor", "FSDP × tensor"}


@pytest.mark.parametrize("name", few(LAYOUTS, BY_DAY))
def test_one_rank_of_1024_holds_and_sends_what_is_planned(name):
    layout, precision = LAYOUTS[name]
    whole = name in ("FSDP", "data × pipeline × tensor")
    # Six layers take as many seconds; of the vocabulary each of 1,024 ranks has as many rows.
    shape = LLAMA if whole else replace(LLAMA, layers=6, vocabulary=128 * 1024)
    step = scaling.rehearse(shape, layout, precision)
    planned = peaks(shape, layout, precision=precision)[0]
    for kind in "parameters", "gradients", "optimizer states":
        assert step.memory[kind] == planned.categories[kind], kind
    assert not whole or planned == planner.peak(shape, layout, precision=precision)
    assert step.sent == planned_bytes(shape, layout, precision)
    assert not dist.is_initialized()
    kept = kept_of_loss_and_small(shape, layout, precision)
    assert step.memory["activations"] == planned.activations + kept


MANY = replace(FSDP, world_size=4096)


@pytest.fixture(scope="module")
def step_of_many():
    return scaling.rehearse(LLAMA, MANY)


@pytest.mark.soak
def test_each_unit_of_fsdp_is_gathered_twice_and_reduced_once(step_of_many):
    step = step_of_many
    found = Counter((m.operation, m.nbytes, len(m.group)) for m in step.trace.messages)
    planned = planner.messages(LLAMA, MANY, "autocast")
    assert found == {tuple(each[:3]): each.times for each in planned}
    assert sum(found.values()) == 3 * 34  # 32 layers, and two ends
    assert step.sent == planned_bytes(LLAMA, MANY, "autocast")
    # Flash attention's backward computes the scores again: 5 products of matrices, not 4.
    again = LLAMA.layers * LLAMA.attention_flops / 2
    assert step.trace.flops == LLAMA.length * (LLAMA.flops + again)
    # At most three units at once: the planner has two, each with its gradient.
    planned = planner.peak(LLAMA, MANY, precision="autocast").total
    assert step.peak == pytest.approx(planned, rel=0.1)


def together(shape, layout):
    """The same training on real ranks, with numbers."""
    torch.manual_seed(0)
    model = scaling.Llama(shape).to_empty(device="cpu")
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    tokens = torch.randint(
        shape.vocabulary,
        (layout.micro_batches, shape.length),
        generator=torch.Generator().manual_seed(dist.get_rank() // layout.tensor),
    )
    if layout.stage == 3:
        model = md.FullyShardedDataParallel(model, auto_wrap_policy=scaling.rehearsal.UNITS)
    else:
        sizes = layout.data, layout.pipeline, layout.tensor
        model = md.mixed.MixedParallel(
            model,
            md.mixed.mesh(*sizes),
            layout.micro_batches,
            balance=scaling.rehearsal._balance(shape, layout),
            plan=plan_of(shape),
            sequence_parallel=layout.sequence_parallel,
        )
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        with md.measure.MemoryTracker(model, optimizer) as memory, md.measure.TrafficCounter() as t:
            if layout.stage:
                nn.functional.cross_entropy(
                    model(tokens).flatten(0, 1), tokens.flatten()
                ).backward()
            else:
                model.train_step(tokens, tokens, model.cross_entropy)
            optimizer.step()
    return memory.live, t.by_group


SMALL_LAYOUTS = {
    "FSDP": planner.Layout(4, stage=3),
    "tensor": planner.Layout(4, 2),
    "all three": planner.Layout(8, 2, 2, micro_batches=4, sequence_parallel=True),
}


@pytest.mark.parametrize("name", few(SMALL_LAYOUTS, {"FSDP", "tensor"}))
def test_a_rank_alone_does_what_a_rank_among_others_does(pools, name):
    """The rehearsal against real ranks that train the same model with numbers."""
    layout = SMALL_LAYOUTS[name]
    step = scaling.rehearse(SMALL, layout, "float32")
    live, by_group = pools(layout.world_size)(together, SMALL, layout)[0]
    steps = 4 * len(list(scaling.Llama(SMALL).parameters()))  # Adam's counts
    for kind, nbytes in step.memory.items():
        if kind == "activations":
            continue
        assert nbytes <= live[kind] <= nbytes + (steps if "states" in kind else 0), kind
    real = Counter()
    for ranks, calls in by_group.items():
        for operation, (_, nbytes) in calls.items():
            operation = {"isend": "send"}.get(operation, operation)
            real[operation, len(ranks)] += nbytes
    for (operation, ranks), nbytes in step.sent.items():
        if operation != "receive":
            # Real ranks also agree: flags, rows, the loss. That is little.
            assert nbytes <= real[operation, ranks] <= nbytes + 1000, (operation, ranks)


def test_your_own_code_as_one_rank_of_many():
    with scaling.one_rank_of(50) as trace:
        assert (dist.get_rank(), dist.get_world_size()) == (0, 50)
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 10))
        model = md.FullyShardedDataParallel(model, auto_wrap_policy=by_class(nn.Linear))
        rows = [len(p._local_tensor) for p in model.parameters()]
        assert rows == [2, 2, 1, 1]  # of 100, and of 10
        trace.clear()
        model(torch.empty(5, 100, device="meta")).sum().backward()
    gathered = [m.nbytes for m in trace.messages if m.operation == "all_gather"]
    assert sorted(gathered) == 2 * [4 * 50 * 101] + 2 * [4 * 100 * 101]  # 10 rows padded to 50
    waited = [e.message for e in trace.events if isinstance(e, scaling.Waited)]
    assert sorted(waited) == list(range(len(trace.messages)))  # for each message, once
    assert trace.flops == 2 * 5 * (100 * 100 + 100 * 10) * 3 - 2 * 5 * 100 * 100
    assert not dist.is_initialized()


@pytest.mark.parametrize("wrap", [md.DistributedDataParallel, md.fully_shard])
def test_other_strategies_run_as_they_are(wrap):
    """Twice: after its first step DDP makes its buckets anew."""
    with scaling.one_rank_of(64) as trace:
        with torch.device("meta"):
            model = wrap(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64)))
        for _ in range(2):
            trace.clear()
            model(torch.empty(5, 64, device="meta")).sum().backward()
    sent = Counter(m.operation for m in trace.messages)
    both = {"all_reduce": 1} if wrap is md.DistributedDataParallel else {"reduce_scatter": 1}
    assert both.items() <= sent.items(), sent


CALLS = {
    "all_to_all_single": lambda x: (x, x),
    "reduce": lambda x: (x, 0),
    "all_gather": lambda x: ([x] * 16, x),
    "scatter": lambda x: (x, [x] * 16),
}


def test_a_call_that_cannot_be_noted_is_refused():
    x = torch.empty(16, device="meta")
    for call, args in CALLS.items():
        with scaling.one_rank_of(16), pytest.raises(NotImplementedError, match=f"note {call}. It"):
            getattr(dist, call)(*args(x))


def test_it_leaves_nothing_behind():
    before = torch.is_autocast_enabled
    with pytest.raises(ZeroDivisionError), scaling.one_rank_of(64):
        raise ZeroDivisionError
    assert torch.is_autocast_enabled is before and not dist.is_initialized()


def rehearse_on_4(**layout):
    return scaling.rehearse(SMALL, planner.Layout(4, **layout))


SENT = scaling.Trace([scaling.Message("send", 8, (0, 1))])
MISTAKES = {
    "no rank 0 of 0": lambda: scaling.one_rank_of(0).__enter__(),
    "stage must be one of 0, 3, not 1": lambda: rehearse_on_4(stage=1),
    "precision must be one of float32, bfloat16, not 'autocast'": rehearse_on_4,
    "recomputes nothing": lambda: rehearse_on_4(stage=3, recompute="layers"),
    "Llama is a shape with llama=True": lambda: scaling.Llama(planner.MODELS["gpt-2"]),
    "a pipeline's messages": lambda: scaling.play(SENT, planner.GPUS["a100"]),
    "recompute must be": lambda: planner.messages(SMALL, planner.Layout(recompute="layers")),
    "number must be": lambda: planner.messages(SMALL, planner.Layout(), number=1),
}


def test_mistakes():
    for words, mistake in MISTAKES.items():
        with pytest.raises(ValueError, match=words):
            mistake()
        assert not dist.is_initialized()


def test_a_rank_of_a_group_cannot_be_another(pools):
    def run():
        with pytest.raises(RuntimeError, match="a rank already"):
            scaling.one_rank_of(1024).__enter__()
        return dist.get_world_size()

    assert pools(2)(run) == [2, 2]


# ---- the time of a step ------------------------------------------------------------------------


def test_a_trace_is_played_message_by_message():
    """Two groups have two lines; what is waited for at once is not hidden."""
    device = planner.Device(1e9, 1e9, md.Link(8, 0), per_node=8)  # 1 GB/s; 1 s for 1e9 operations
    both, pair = tuple(range(4)), (0, 1)
    gather = partial(scaling.Message, "all_gather")
    W = scaling.Waited
    ring = device.ring("all_gather", 4, 1e9)
    assert ring == pytest.approx(0.75)
    hidden = [gather(1e9, both), 1e9, W(0)]
    seen = [gather(1e9, both), W(0), 1e9]
    queue = [gather(1e9, both), gather(1e9, both), W(1)]
    lines = [gather(1e9, both), gather(1e9, pair), W(1), W(0)]
    left = [1e9, gather(1e9, both)]
    for events, total in (
        (hidden, 1.0),
        (seen, 1.75),
        (queue, 1.5),
        (lines, 0.75),
        (left, 1.75),
    ):
        played = scaling.play(scaling.Trace(events), device)
        assert played.total == pytest.approx(total)
        assert played.hidden + played.waiting == pytest.approx(played.communication)


def test_what_is_played_is_what_is_planned(step_of_many):
    """Messages to the last one; what they make a rank wait, nearly: at few ranks only ends are not
    hidden. The planner halves attention, which torch counts whole."""
    slow = replace(planner.GPUS["h100"], utilisation=0.4, bandwidth=math.inf, attention=None)
    played = scaling.play(step_of_many.trace, slow)
    planned = planner.step_time(LLAMA, MANY, slow, "autocast")
    assert played.communication == pytest.approx(planned.data, rel=1e-6)
    masked = 32 * 8192 * 3.5 / 2 * LLAMA.attention_flops
    assert played.compute == pytest.approx(planned.compute + slow.seconds(masked), rel=1e-6)
    assert 0 < planned.communication < planned.data
    assert played.waiting == pytest.approx(planned.communication, rel=0.15)


# ---- failures ----------------------------------------------------------------------------------


def test_no_other_interval_is_better_by_far():
    """Played out: of intervals from a quarter to four times Young's, none takes less time, but for
    the noise of chance."""
    save, between = 60, 10_000
    work, best = 400 * between, planner.young(save, between)
    assert best == pytest.approx(math.sqrt(2 * 60 * 10_000))

    def mean(interval):
        runs = [
            planner.run_with_failures(work, interval, save, between, seed=seed)
            for seed in range(12)
        ]
        return statistics.mean(runs)

    least = mean(best)
    assert least == pytest.approx(planner.expected_time(work, best, save, between), rel=0.03)
    assert mean(best / 4) > 1.02 * least and mean(best * 4) > 1.02 * least
    for factor in 0.7, 1.4:
        assert mean(best * factor) > 0.985 * least
    assert planner.run_with_failures(100, 10, 1, math.inf) == 110  # no failure: ten saves


def test_a_run_that_would_never_end_is_refused():
    with pytest.raises(ValueError, match="no save would ever be whole"):
        planner.run_with_failures(1e6, 1e5, 1, 100)
    assert planner.run_with_failures(100, 1e9, 1, 50) >= 101  # it ends before its first interval
    with pytest.raises(ValueError, match="save must be more than 0"):
        planner.young(0, 10)


def test_a_race_of_pipelines_that_sleep(monkeypatch) -> None:
    monkeypatch.setenv("MINIDIST_TIMING", "soft")  # one round
    (step,) = pipelines.race([("gpipe", 4)], ms=0.5)
    assert step.predicted.idle == pytest.approx(3 / 7) and len(step.traces) == 4
    assert step.predicted.time == pytest.approx(16 * 0.5e-3 * 3 * (4 + 3) / 4)
    assert step.measured > 0.98 * step.predicted.time


def bytes_of_parameters(chain, sizes):
    model = md.mixed.MixedParallel(chain.module(), md.mixed.mesh(*sizes), 2, plan=PLAN)
    return sum(parameter.nbytes for parameter in model.parameters())


def test_a_chain_holds_and_sends_on_each_mesh_what_its_formulas_say():
    chain = Chain(layers=4, width=16, hidden=8, rows=8, length=8, ms=0.5)
    link = md.Link(gbps=10, inter=md.Link(gbps=1, latency_us=100))
    with md.ranks(4, nodes=2, link=link) as pool:
        for sizes in (4, 1, 1), (2, 1, 2), (1, 1, 4), (1, 2, 2), (1, 4, 1):
            assert pool(bytes_of_parameters, chain, sizes) == [chain.held(sizes)] * 4
            parts, nbytes = chain.measure(pool, sizes, 4)
            assert 0 <= nbytes - chain.leaving(sizes) < 600  # the loss, and what ranks agree on
            predicted = chain.predict(link, sizes, 4)
            assert parts.keys() == predicted.keys() == {"passes", "waiting", "data"}
            asleep = 8 * 4 * 3 * 0.5e-3 / 4  # of all rows in all layers, a quarter on each rank
            assert asleep < parts["passes"] and asleep <= predicted["passes"] * (1 + 1e-9)
            assert (parts["data"] > 0) == (predicted["data"] > 0) == (sizes[0] > 1)
            # Stages wait longer than (p - 1)/m, which is the bubble without messages.
            bubble = (sizes[1] - 1) / chain.microbatches(sizes, 4) * predicted["passes"]
            assert predicted["waiting"] >= 0.9 * bubble
