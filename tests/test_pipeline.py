"""Stages on ranks train as the whole model does on one process, whatever the schedule."""

import copy
import gc
import itertools
import queue
import threading
import weakref
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import minidist as md
from minidist.collectives import peers
from minidist.pipeline import (
    SCHEDULES,
    Schedule,
    naive,
    simulate,
)
from minidist.pipeline.instructions import (
    Backward,
    Forward,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)
from minidist.pipeline.schedules import forward_only, with_messages
from minidist.pipeline.stage import Stage, backward_inputs

apart = md.parity.relative_difference


# ---- the idea, in one function ------------------------------------------------------------------


def test_the_naive_pipeline_trains_as_one_process_does(pools):
    widths = 6, 7, 8, 3

    def run():
        rank = dist.get_rank()
        torch.manual_seed(0)
        plain = nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(widths)]).double()
        stage = copy.deepcopy(plain[rank])
        both = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (plain, stage)]
        found = []
        for step in range(3):
            inputs, targets = digits(step, rows=12)
            loss = F.cross_entropy(plain(inputs), targets)
            loss.backward()
            shape = (widths[rank],)
            ours = naive.train_step(stage, inputs, targets, F.cross_entropy, 4, shape)
            wanted = loss if rank == 2 else torch.zeros(())
            pairs = zip(stage.parameters(), plain[rank].parameters(), strict=True)
            found += [(ours - wanted).abs().item(), *(apart(a.grad, b.grad) for a, b in pairs)]
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        return max(found)

    assert max(pools(3)(run)) <= 1e-12


# ---- training ---------------------------------------------------------------------------------


def mlp(dtype=torch.float64):
    return md.zoo.mlp(6, 7, 8, 7, 6, 5, 3, dtype=dtype)  # 11 layers


def transformer(dtype=torch.float64):
    model = md.zoo.Transformer(vocabulary=17, length=5, width=8, layers=6)
    return model.sequential().to(dtype)  # 9 layers


def digits(step, rows=11, dtype=torch.float64):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(rows, 6, dtype=dtype, generator=generator)
    return inputs, torch.randint(3, (rows,), generator=generator)


def words(step, rows=11):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(17, (rows, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train(make, data, microbatches, schedule, steps=3, norm_type=2.0, balance=None, **options):
    """Beside one process, by Adam with clipping. Returns the largest relative difference, and
    the names that were compared."""
    plain = make()
    model = md.Pipeline(copy.deepcopy(plain), microbatches, schedule, balance, **options)
    adam = torch.optim.Adam(plain.parameters(), lr=1e-3)
    ours = torch.optim.Adam([*model.parameters(), torch.zeros(1)], lr=1e-3)  # none is refused
    compared = {}
    for step in range(steps):
        inputs, targets = data(step)
        loss = md.parity.cross_entropy(plain(inputs), targets)
        adam.zero_grad()
        loss.backward()
        compared["loss"] = apart(model.train_step(inputs, targets, md.parity.cross_entropy), loss)
        wanted = dict(plain.named_parameters(remove_duplicate=False))
        for name, p in model.module.named_parameters(remove_duplicate=False):
            assert (p.grad is None) == (wanted[name].grad is None), name
            if p.grad is not None:
                compared[f"{name}.grad"] = apart(p.grad, wanted[name].grad)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.02, norm_type)
        assert norm > 0.02
        compared["norm"] = apart(model.clip_grad_norm_(0.02, norm_type), norm)
        adam.step()
        ours.step()
        ours.zero_grad()
        for name, value in model.state_dict().items():
            compared[name] = apart(value, plain.state_dict()[name])
        assert all(difference <= 1e-12 for difference in compared.values()), (step, compared)
    times = [moment for span in model.trace for moment in (span.start, span.end)]
    assert times == sorted(times) and len(times) == 2 * len(model.trace) > 0
    if isinstance(schedule, str) and balance is None and "process_group" not in options:
        made = SCHEDULES[schedule](dist.get_world_size(), microbatches)
        assert [span.instruction for span in model.trace] == made.ranks[dist.get_rank()]
    return set(compared)


def names(model):
    return {"loss", "norm", *model.state_dict(), *(f"{k}.grad" for k in model.state_dict())}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_train_as_one_process_does(pools, schedule):
    for ranks, recompute in ((2, True), (3, False), (4, True)):
        microbatches = 4 if ranks % 2 == 0 else 6  # of 11 rows: some have one row more
        balance = [1, 2, 1, 1, 1, 1, 2, 2] if (ranks, schedule) == (4, "interleaved") else None
        found = pools(ranks)(
            train, mlp, digits, microbatches, schedule, balance=balance, recompute=recompute
        )
        assert set.union(*found) == names(mlp()), ranks
        assert all(len(own) > 2 for own in found), ranks


def test_stages_train_over_gloo(gloo):
    for schedule in SCHEDULES:
        assert set.union(*gloo(train, mlp, digits, 3, schedule)) == names(mlp()), schedule


def test_a_tied_first_and_last_layer(pools):
    both_ends_on_one = {"balance": [1] * 8 + [1], "recompute": True}  # on rank 0, and 2
    for ranks, schedule, options in (
        (2, "gpipe", {"norm_type": float("inf")}),
        (3, "zero_bubble", {"norm_type": 1.0}),
        (3, "interleaved", both_ends_on_one),
    ):
        found = pools(ranks)(train, transformer, words, 3, schedule, **options)
        assert set.union(*found) == names(transformer()), (ranks, schedule)


def test_gradients_add_up_and_ties_stay_the_same_bits(pools):
    def add():
        plain = transformer()
        model = md.Pipeline(copy.deepcopy(plain), 4)
        for step in range(3):
            md.parity.cross_entropy(plain(words(step)[0]), words(step)[1]).backward()
            model.train_step(*words(step), md.parity.cross_entropy)
        wanted = dict(plain.named_parameters(remove_duplicate=False))
        ours = dict(model.module.named_parameters(remove_duplicate=False))
        tied = ours.get("0.tokens.weight", ours.get("8.weight"))
        return max(apart(p.grad, wanted[name].grad) for name, p in ours.items()), tied.grad.tolist()

    (first, gradient), (second, other) = pools(2)(add)
    assert max(first, second) <= 1e-12 and gradient == other


def frozen():
    model = mlp()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    model[8].requires_grad_(False)
    return model


class Twice(nn.Linear):
    """Uses its weight twice."""

    def forward(self, x):
        return super().forward(super().forward(x).tanh())


def twice():
    torch.manual_seed(0)
    layers = Twice(6, 6), nn.ReLU(), Twice(6, 6), nn.ReLU(inplace=True), Twice(6, 6)
    # A stage cannot begin with a layer that overwrites its input.
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_models_of_other_kinds(pools, schedule):
    for make, balance in ((frozen, None), (twice, [1, 3, 1])):
        found = pools(3)(train, make, digits, 4, schedule, balance=balance)
        assert set.union(*found) >= {"loss", "norm", *make().state_dict()}, make


def test_a_group_of_ranks_and_rank_0s_weights(pools):
    def run():
        group = dist.new_group([3, 1])  # group rank 0 is rank 1
        if dist.get_rank() in (0, 2):
            return None
        model = mlp()
        with torch.no_grad():
            for p in model.parameters():
                p += dist.get_rank() - 1
        found = train(mlp, digits, 4, "1f1b", process_group=group)
        pipeline = md.Pipeline(model, 2, process_group=group)
        return found, max(apart(v, mlp().state_dict()[k]) for k, v in pipeline.state_dict().items())

    _, first, _, second = pools(4)(run)
    assert first[0] | second[0] == names(mlp()) and first[1] == second[1] == 0
    assert "0.weight" in first[0] and "10.weight" in second[0]


def test_other_dtypes(pools):
    def run(dtype):
        plain = mlp(dtype)
        model = md.Pipeline(copy.deepcopy(plain), 3, "zero_bubble")
        inputs, targets = digits(0, rows=12, dtype=dtype)
        loss = F.cross_entropy(plain(inputs), targets)
        loss.backward()
        found = model.train_step(inputs, targets, F.cross_entropy)
        ours = model.module.named_parameters()
        pairs = [(p.grad, plain.get_parameter(name).grad) for name, p in ours]
        assert all(a.dtype == dtype for a, _ in pairs)
        return max(apart(a, b) for a, b in [*pairs, (found, loss)])

    for dtype, allowed in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        assert max(pools(3)(run, dtype)) <= allowed, dtype


class Branches(nn.Module):
    """One tensor in; out come several, of which two get a gradient, and what is no tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6).double()

    def forward(self, x):
        return {"h": self.linear(x), "mask": x > 0, "skip": [x, None, 0.5], "rows": (10 * x).long()}


class Joins(nn.Module):
    """Takes what `Branches` gives, and gives the like."""

    def __init__(self):
        super().__init__()
        self.linear, self.side = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()

    def forward(self, several):
        x, none, scale = several["skip"]
        assert none is None and several["rows"].dtype == torch.int64
        h = self.linear(several["h"]).masked_fill(several["mask"], 0.0)
        return several | {"h": h, "skip": [scale * self.side(x) + several["rows"], None, 0.5]}


class Ends(nn.Linear):
    def forward(self, several):
        return super().forward(several["h"] + several["skip"][0])


def several():
    torch.manual_seed(0)
    return nn.Sequential(Branches(), Joins(), Joins(), Ends(6, 3).double())


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_what_travels_between_stages(pools, schedule):
    for recompute in False, True:
        options = dict(balance=[1, 1, 1, 1], recompute=recompute)
        found = pools(4)(train, several, digits, 4, schedule, **options)
        assert set.union(*found) == names(several()), recompute


def test_batches_of_other_rows_and_lengths(pools):
    def run(schedule):
        plain = md.zoo.Transformer(vocabulary=17, length=8, width=8, layers=3).sequential().double()
        model, found = md.Pipeline(copy.deepcopy(plain), 4, schedule), []
        for rows, length in ((8, 5), (11, 8), (4, 5), (8, 5)):
            draw = torch.Generator().manual_seed(rows)
            tokens = torch.randint(17, (rows, length), generator=draw)
            plain.zero_grad(), model.zero_grad()
            loss = md.parity.cross_entropy(plain(tokens), tokens)
            loss.backward()
            given = tokens if dist.get_rank() == 0 else None
            found.append(apart(model.train_step(given, tokens, md.parity.cross_entropy), loss))
            ours = model.module.named_parameters()
            found += [apart(p.grad, plain.get_parameter(name).grad) for name, p in ours]
        return max(found)

    for schedule in "1f1b", "interleaved":
        assert max(pools(2)(run, schedule)) <= 1e-12, schedule


# ---- backward in two parts --------------------------------------------------------------------


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_neither_part_of_backward_does_the_others_work():
    model, x = md.zoo.Block(8, 2).double(), torch.randn(2, 4, 8).double()
    plain, y = copy.deepcopy(model), x.clone().requires_grad_()
    x.requires_grad_()
    loss = plain(y).sum()
    with Counted() as whole:
        loss.backward()
    output = model(x).sum()
    with Counted() as first:
        (gradient,), left = backward_inputs([get_gradient_edge(output)], [None], [x])
    assert all(p.grad is None for p in model.parameters())
    with Counted() as second:
        for add in left:
            add()
    assert apart(gradient, y.grad) == 0 and x.grad is None
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert apart(p.grad, q.grad) == 0
    assert (first.calls["mm"], second.calls["mm"], whole.calls["mm"]) == (4, 4, 8)
    for operation in ("gelu_backward", "_scaled_dot_product_flash_attention_for_cpu_backward"):
        assert (first.calls[operation], second.calls[operation]) == (1, 0)
    assert (first.calls["sum"], second.calls["sum"]) == (0, whole.calls["sum"])  # of biases


def test_the_graph_is_gone_after_both_parts():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4)
    stage = Stage(model)
    saved = []

    def pack(tensor):
        box = tensor.detach()
        saved.append(weakref.ref(box))
        return box

    def alive():
        gc.collect()
        return sum(box() is not None for box in saved)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box):
        stage.forward(0, x.requires_grad_())
    kept = alive()
    stage.backward_inputs(0, [torch.ones(2, 4)])
    assert alive() == kept == len(saved) > 0
    stage.backward_weights(0)
    assert alive() == 0 and all(p.grad is not None for p in model.parameters())


# ---- what is kept -----------------------------------------------------------------------------


def activations(schedule, microbatches, recompute=False, layers=8, width=16, rows=4):
    """The most bytes of activations that this rank keeps in a step."""
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(8)])
    model = md.Pipeline(module, microbatches, schedule, recompute=recompute)
    batch = torch.randn(rows * microbatches, width)
    for _ in range(2):
        with md.measure.MemoryTracker(model) as memory:
            model.train_step(batch, batch, lambda y, t: (y * t).mean())
    return memory.peak_of["activations"]


def test_the_activations_kept_are_those_predicted(pools):
    ranks, m = 4, 8
    kept = {
        schedule: pools(ranks)(activations, schedule, m)
        for schedule in ("gpipe", "1f1b", "zero_bubble")
    }
    layers, one = 8 // ranks, 4 * 16 * 4  # what a layer gives: (4, 16) of float32
    for schedule, found in kept.items():
        in_flight = simulate(SCHEDULES[schedule](ranks, m)).in_flight
        # What the layers gave, and what came in; the first stage's inputs are the batch's own.
        wanted = [n * (layers + (rank > 0)) * one for rank, n in enumerate(in_flight)]
        more = [a - b for a, b in zip(found, wanted, strict=True)]
        # A message waits for its turn, and one that leaves is not yet let go. The first part of
        # zero bubble's backward frees some of it.
        assert all(x in (0, one, 2 * one) or (schedule == "zero_bubble" and x < 0) for x in more)
        assert more == [0] * ranks or schedule != "gpipe"
    assert all(a < b for a, b in zip(kept["1f1b"], kept["gpipe"], strict=True))


def test_recomputing_keeps_inputs_only(pools):
    m, layers, one = 6, 2, 4 * 16 * 4
    kept = pools(4)(activations, "gpipe", m, recompute=True)
    assert kept == [layers * one] + 3 * [(m + layers) * one]


class Noisy(nn.Module):
    """Dropout, a buffer that counts passes, and one that is another tensor after each."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes = self.passes + 1
        return F.dropout(self.norm(self.linear(x)).tanh(), 0.5, self.training)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "interleaved"])
def test_recomputing_repeats_dropout_and_leaves_buffers(pools, schedule):
    def run():
        results = []
        for recompute in (False, True):
            torch.manual_seed(0)
            module = nn.Sequential(*[Noisy() for _ in range(4)]).double()
            model = md.Pipeline(module, 4, schedule, recompute=recompute)
            losses = [model.train_step(*digits(step), F.cross_entropy).item() for step in range(3)]
            gradients = [p.grad.tolist() for p in model.parameters()]
            buffers = [b.tolist() for b in model.buffers()]
            results.append((losses, gradients, buffers, torch.rand(1).item()))
            counts = "norm.num_batches_tracked", "passes"
            first = 0 if dist.get_rank() == 0 else 3  # rank 0's first layer, and rank 1's last
            passes = [int(model.state_dict()[f"{first}.{name}"]) for name in counts]
        return results[0] == results[1], passes, len(set(results[0][0]))

    assert pools(2)(run) == [(True, [12, 12], 3)] * 2


# ---- what travels, and when -------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "v"), [("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2)])
def test_bytes_that_travel(pools, schedule, v):
    def run():
        module = nn.Sequential(*[nn.Linear(6, 6) for _ in range(8)])
        model = md.Pipeline(module, 4, schedule)
        steps = []
        for rows in (8, 8, 4, 8):
            with md.measure.TrafficCounter() as traffic:
                model.train_step(torch.ones(rows, 6), torch.ones(rows, 6), F.mse_loss)
            steps.append(traffic)
        return steps

    p, m, row = 2, 4, 6 * 4
    boundaries = p * v - 1
    steps = zip((8, 8, 4, 8), (True, False, True, False), *pools(2)(run), strict=True)
    for rows, new, *ranks in steps:
        assert sum(rank.sent_messages for rank in ranks) == 2 * boundaries * m
        assert sum(rank.sent_bytes for rank in ranks) == 2 * boundaries * rows * row
        # At the end the loss, and whether all went well.
        assert all(rank.calls == {"all_reduce": (1, 16)} for rank in ranks)
        # Before all else what is to come; and what the first of its kind is, in two messages.
        first = 2 * boundaries if new else 0
        assert sum(rank.control_messages for rank in ranks) == p - 1 + first
        told = sum(rank.control_bytes for rank in ranks)
        assert told > 16 * (p - 1) if new else told == 16 * (p - 1)


class Work:
    def __init__(self):
        self.done = threading.Event()

    def wait(self):
        if not self.done.wait(8):
            raise RuntimeError("waits for ever")


class OneQueue:
    """torch.distributed by NCCL's rule, over any backend: two ranks have one queue for what they
    send each other, both ways; a message begins when the one before it has ended, and ends only
    with the other rank's receive."""

    def __init__(self):
        self.queues = {}

    def __getattr__(self, name):
        return getattr(dist, name)

    def put(self, peer, *message):
        if peer not in self.queues:
            self.queues[peer] = queue.Queue()
            threading.Thread(target=self.run, args=(peer, self.queues[peer]), daemon=True).start()
        work = Work()
        self.queues[peer].put((work, *message))
        return work

    def run(self, peer, messages):
        ready = torch.zeros(1)
        while (message := messages.get()) is not None:
            work, sends, x, group = message
            if sends:
                dist.recv(ready, group=group, group_src=peer, tag=7)
                dist.send(x, group=group, group_dst=peer, tag=8)
            else:
                dist.send(ready, group=group, group_dst=peer, tag=7)
                dist.recv(x, group=group, group_src=peer, tag=8)
            work.done.set()

    def isend(self, x, group=None, group_dst=None, tag=0):
        return self.put(group_dst, True, x, group)

    def irecv(self, x, group=None, group_src=None, tag=0):
        return self.put(group_src, False, x, group)

    def close(self):
        for messages in self.queues.values():
            messages.put(None)


def with_one_queue(*args, **options):
    one, before = OneQueue(), peers.dist
    peers.dist = one
    try:
        found = train(*args, **options)
        assert one.queues  # or the messages went another way
        return found
    finally:
        one.close()
        peers.dist = before


def test_one_queue_for_each_pair_of_ranks_is_enough(pools):
    for schedule in SCHEDULES:
        balance = None if schedule != "interleaved" else [1] * 3 + [6]
        found = pools(2)(with_one_queue, transformer, words, 4, schedule, balance=balance)
        assert set.union(*found) == names(transformer()), schedule


# ---- what is wrong ----------------------------------------------------------------------------


def told(pool, fn):
    """What each rank is told when it runs `fn`: [(type, text)]."""

    def run():
        try:
            fn()
        except Exception as error:
            return type(error).__name__, str(error)
        return None

    return pool(run)


def four():
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])


HANGS = [  # the one sends an activation while the other sends a gradient
    [Forward(0, 0), SendActivation(0, 0), Forward(0, 1), SendActivation(0, 1)]
    + [ReceiveGradient(0, 0), Backward(0, 0), ReceiveGradient(0, 1), Backward(0, 1)],
    [ReceiveActivation(1, 0), Forward(1, 0), Backward(1, 0), SendGradient(1, 0)]
    + [ReceiveActivation(1, 1), Forward(1, 1), Backward(1, 1), SendGradient(1, 1)],
]
WRONG = {
    "no sequence": (lambda: md.Pipeline(nn.Linear(3, 3), 2), "cuts an nn.Sequential, not Linear"),
    "more stages than layers": (
        lambda: md.Pipeline(four()[:3], 2, "interleaved"),
        "3 layers cannot be cut into 4 stages",
    ),
    "a balance of other stages": (
        lambda: md.Pipeline(four(), 2, balance=[2, 1, 1]),
        "balance [2, 1, 1] must share out 4 layers over 2 stages, those of 1f1b on 2 ranks",
    ),
    "no schedule": (
        lambda: md.Pipeline(four(), 2, "2f2b"),
        "there is no schedule '2f2b'; there are naive, gpipe, 1f1b, interleaved, zero_bubble",
    ),
    "a schedule that hangs": (
        lambda: md.Pipeline(four(), 2, Schedule("mine", 2, 2, HANGS)),
        "mine, rank 0, position 3, SendActivation(0, 1): deadlock with blocking sends",
    ),
    "only one rank is wrong": (
        lambda: md.Pipeline(four(), 2, balance=[2, 2 + dist.get_rank()]),
        "rank 1: balance [2, 3] must share out 4 layers over 2 stages",
    ),
    "they disagree about the schedule": (
        lambda: md.Pipeline(four(), 2, ["1f1b", "gpipe"][dist.get_rank()]),
        "the ranks disagree about schedule: rank 0 says Schedule(name='1f1b'",
    ),
    "a strategy around stages whose backward is in two parts": (
        lambda: md.Pipeline(four(), 2, "zero_bubble", wrap=md.FullyShardedDataParallel),
        "wrap takes no schedule that goes back in two parts, and no parameter of two stages",
    ),
    "another strategy around stages": (
        lambda: md.Pipeline(four(), 2, wrap=nn.parallel.DistributedDataParallel),
        "wrap takes md.FullyShardedDataParallel or md.fully_shard",
    ),
    "they disagree about the model": (
        lambda: md.Pipeline(four().append(nn.Linear(3, 3 + dist.get_rank())), 2, balance=[2, 3]),
        "the ranks have different models. The first difference",
    ),
}


def test_what_cannot_be_a_pipeline_is_refused_on_every_rank(pools):
    for what, (make, words) in WRONG.items():
        first, second = told(pools(2), make)
        assert first == second and first is not None, what
        types = "no sequence", "another strategy around stages"
        assert first[0] == ("TypeError" if what in types else "ValueError"), what
        assert words in first[1], what


class Grows(nn.Module):
    """Its outputs have another shape, or none, from its third micro-batch on."""

    def __init__(self, more):
        super().__init__()
        self.more, self.calls = more, 0

    def forward(self, x):
        self.calls += 1
        return x if self.calls < 3 else F.pad(x, (0, 1)) if self.more else 1 / 0


FAILURES = {
    "rank 1 raised ValueError: stage 1 gives TensorSpec(shape=torch.Size([3, 4])": (
        lambda: [nn.Linear(3, 3), Grows(True), nn.Linear(3, 3)],
        F.mse_loss,
    ),
    "rank 1 raised ZeroDivisionError: division by zero": (
        lambda: [nn.Linear(3, 3), Grows(False), nn.Linear(3, 3)],
        F.mse_loss,
    ),
    "rank 2 raised ValueError: the loss needs no gradient": (
        lambda: four()[:3],
        lambda y, t: F.mse_loss(y.detach(), t),
    ),
    "rank 0 raised ValueError: a batch of 9 rows cannot be cut into 12 micro-batches": (
        lambda: four()[:3],
        None,
    ),
}


def test_a_step_that_fails_names_the_rank(pools):
    def run(make, loss_fn):
        model = md.Pipeline(nn.Sequential(*make()), 3 if loss_fn else 12, balance=[1, 1, 1])
        model.train_step(torch.ones(9, 3), torch.ones(9, 3), loss_fn)

    for words, (make, loss_fn) in FAILURES.items():
        with pytest.raises(md.RankError) as why:
            pools(3)(run, make, loss_fn)
        assert str(why.value).startswith(words), why.value


def test_only_the_ends_need_the_batch_which_is_cut_evenly(pools):
    def run():
        model, (inputs, targets), rows = md.Pipeline(mlp(), 4), digits(0), []

        def loss_fn(y, t):
            rows.append((len(y), len(t)))
            return F.cross_entropy(y, t)

        rank = dist.get_rank()
        batch = inputs if rank == 0 else None, targets if rank == 2 else None
        loss = model.train_step(*batch, loss_fn if rank == 2 else None)
        return loss.item(), F.cross_entropy(mlp()(inputs), targets).item(), rows

    found = pools(3)(run)
    for ours, wanted, _ in found:
        assert ours == pytest.approx(wanted, rel=1e-12)
    assert [rows for _, _, rows in found] == [[], [], [(3, 3), (3, 3), (3, 3), (2, 2)]]


# ---- from the device meta -----------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_from_meta_it_trains_as_what_one_process_draws(pools, schedule):
    def make():
        layers = nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)
        return nn.Sequential(*layers).double()

    def run():
        with torch.device("meta"):
            module = make()
        torch.manual_seed(7 + dist.get_rank())  # the first rank's counts
        model = md.Pipeline(module, 6, schedule)
        drawn, whole = torch.rand(3), make()
        torch.manual_seed(7)
        for layer in whole:
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
        after, state = torch.rand(3), whole.state_dict()
        same = all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        inputs, targets = digits(0)
        loss = F.cross_entropy(whole(inputs), targets)
        difference = apart(model.train_step(inputs, targets, F.cross_entropy), loss)
        return same, torch.equal(drawn, after), difference

    for same, goes_on, difference in pools(2)(run):
        assert same and goes_on and difference <= 1e-12


def test_from_meta_no_rank_ever_holds_more_than_its_stage(pools):
    layer = 4 * 129 * 128

    def run():
        with torch.device("meta"):
            module = nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)])
        with md.measure.MemoryTracker(module) as memory:
            model = md.Pipeline(module, 4)
        own = sum(p.untyped_storage().nbytes() for p in model.parameters())
        assert all(p.is_meta or p in set(model.parameters()) for p in module.parameters())
        assert model.train_step(*torch.ones(2, 8, 128), F.mse_loss).isfinite()
        return own, memory.peak

    for own, peak in pools(4)(run):
        assert own == 2 * layer and own <= peak < own + layer


# ---- as a module ------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_evaluation_gives_the_outputs_on_every_rank(pools, schedule):
    def run():
        module = nn.Sequential(*mlp(), nn.Dropout(0.5)).double()
        model = md.Pipeline(copy.deepcopy(module), 4, schedule).eval()
        results = []
        for rows in (9, 4, 2, 1):  # fewer than micro-batches, too
            inputs = digits(0, rows=rows)[0]
            y = model(inputs if dist.get_rank() == 0 else None)
            results.append((y.requires_grad, apart(y, module.eval()(inputs)), tuple(y.shape)))
        trained = model.train()(digits(0)[0])
        return results, bool((trained == 0).any())

    wanted = [(False, shape) for shape in ((9, 3), (4, 3), (2, 3), (1, 3))]
    for results, dropped in pools(2)(run):
        assert [(grad, shape) for grad, _, shape in results] == wanted
        assert all(difference <= 1e-12 for _, difference, _ in results) and dropped


def test_checkpoints_have_the_names_of_the_whole_module(pools):
    def run():
        whole = transformer()
        model = md.Pipeline(transformer(), 2, balance=[3, 3, 3])
        own = list(model.state_dict())
        for p in model.parameters():
            nn.init.zeros_(p)
        model.load_state_dict(whole.state_dict())  # of the whole module
        model.load_state_dict(model.state_dict())  # of this rank's layers
        full = model.full_state_dict()
        assert all(torch.equal(full[k], v) for k, v in whole.state_dict().items())
        assert list(full) == list(whole.state_dict())
        lacking = {k: v for k, v in whole.state_dict().items() if k != own[0]}
        for wrong in lacking, whole.state_dict() | {"other": torch.ones(1)}:
            with pytest.raises(RuntimeError):
                model.load_state_dict(wrong)
        return own

    assert sum(pools(3)(run), []) == list(transformer().state_dict())


def test_stages_that_are_fully_sharded_are_clipped_and_saved_whole(pools):
    def run():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
        plain, group = mlp(), mesh.get_group("pipeline")
        wrap = partial(md.FullyShardedDataParallel, device_mesh=mesh["data"])
        model = md.Pipeline(copy.deepcopy(plain), 2, process_group=group, wrap=wrap)
        adam, ours = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (plain, model))
        own, found = slice(mesh.get_local_rank("data"), None, 2), []
        for step in range(2):
            inputs, targets = digits(step, rows=12)
            adam.zero_grad()
            ours.zero_grad()
            md.parity.cross_entropy(plain(inputs), targets).backward()
            model.train_step(inputs[own], targets[own], md.parity.cross_entropy)
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.02)
            found.append(apart(model.clip_grad_norm_(0.02), norm))
            adam.step()
            ours.step()
            full, state = model.full_state_dict(), plain.state_dict()
            found += [apart(full[name], value) for name, value in state.items()]
        return max(found)

    assert max(pools(4)(run)) <= 1e-12


def test_other_ranks_layers_are_freed(pools):
    def run():
        module = mlp()
        layers = [weakref.ref(layer) for layer in module]
        model = md.Pipeline(module, 2)
        del module
        gc.collect()
        kept = [number for number, layer in enumerate(layers) if layer() is not None]
        return kept, [int(name) for name, _ in model.module.named_children()]

    (first, own), (second, other) = pools(2)(run)
    assert first == own and second == other and first + second == list(range(11))


def test_a_copy_of_a_pipeline_trains_as_it_does(pools):
    def run():
        model = md.Pipeline(mlp(), 4)
        copied, (inputs, targets) = copy.deepcopy(model), digits(0)
        losses = [each.train_step(inputs, targets, F.cross_entropy) for each in (model, copied)]
        pairs = zip(model.parameters(), copied.parameters(), strict=True)
        return apart(*losses), max(apart(p.grad, q.grad) for p, q in pairs)

    assert pools(2)(run) == [(0, 0)] * 2


def test_the_trace_has_the_time_of_each_computation(pools):
    def run():
        model = md.Pipeline(nn.Sequential(*[md.zoo.Sleep(5) for _ in range(4)]), 2, "interleaved")
        model.train_step(torch.zeros(4, 1), torch.zeros(4, 1), F.mse_loss)
        kinds = Forward, Backward
        spans = [each for each in model.trace if isinstance(each.instruction, kinds)]
        return min(each.end - each.start for each in spans), len(spans)

    for shortest, count in pools(2)(run):
        assert shortest >= 0.01 and count == 8  # two rows of 5 ms


def test_a_schedule_of_ones_own_trains(pools):
    """Micro-batches in another order each way."""
    forward = [[Forward(stage, i) for i in (1, 0, 2)] for stage in range(4)]
    backward = [[Backward(stage, i) for i in (2, 1, 0)] for stage in range(4)]
    rank_0 = [*forward[0], *forward[2], *backward[2], *backward[0]]
    rank_1 = [*forward[1], *forward[3], *backward[3], *backward[1]]
    schedule = with_messages("mine", [rank_0, rank_1], 4, 3)
    assert set.union(*pools(2)(train, mlp, digits, 3, schedule)) == names(mlp())


def test_many_micro_batches_do_not_wait_for_each_other(pools):
    def run():
        model = md.Pipeline(mlp(), 24, "interleaved")  # of which a rank's first stage is done first
        return apart(model(digits(0, rows=30)[0]), mlp()(digits(0, rows=30)[0]))

    assert max(pools(2)(run)) <= 1e-12


def test_there_must_be_a_group():
    with pytest.raises(RuntimeError, match="Pipeline works within a process group"):
        md.Pipeline(four(), 2)
    plan = forward_only(3, 6, 4)
    assert sum(isinstance(x, Forward) for own in plan.ranks for x in own) == 24
