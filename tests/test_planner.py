"""The planner, against the ZeRO paper's table cell by cell, other papers' and teams' published
numbers, and what is counted in real steps: bytes that are held, kept for backward, and sent."""

import math
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import minidist as md
from minidist.__main__ import main
from minidist.collectives import ALGORITHMS, cost
from minidist.fully_sharded import by_class
from minidist.instruments import planner
from minidist.instruments.planner.advice import ALIKE, ERROR, fastest, fits
from minidist.instruments.planner.layout import stages
from minidist.instruments.planner.peak import kept_activations, layer_activations, logits
from minidist.instruments.planner.zero_table import SIZES, zero_cells
from minidist.pipeline import SCHEDULES, simulate


def test_table_1_of_the_zero_paper():
    """To the last digit that is printed: half a unit of it if rounded, one if cut off."""
    for N, size, cells in zero_cells():
        P = SIZES[size]
        for stage, (printed, ours) in enumerate(cells, start=1):
            formula = {1: 4 * P + 12 * P / N, 2: 2 * P + 14 * P / N, 3: 16 * P / N}[stage]
            assert ours == pytest.approx(formula / 1e9, rel=1e-12), (N, size, stage)
            unit = 10.0 ** -len(printed.partition(".")[2])
            if P == 7.5e9:
                assert abs(ours - float(printed)) <= 0.501 * unit, (N, stage)
            else:
                assert 0 <= ours - float(printed) < unit, (N, size, stage)
    said = md.planner.zero_table()
    assert sum(len(cells) for *_, cells in zero_cells()) == 54
    assert len(said.splitlines()) == 2 + 18
    words = "1024 7.5 billion 30.1 30.0879 -0.0% 15.1 15.1025 +0.0% 0.12 0.117188 -2.3%"
    assert said.splitlines()[-3].split() == words.split()


def test_bytes_a_parameter():
    for optimizer, precision, each in [
        ("adam", "mixed", (2, 2, 12)),
        ("adamw", "float32", (4, 4, 8)),
        ("momentum", "float32", (4, 4, 4)),
        ("sgd", "float32", (4, 4, 0)),
        ("sgd", "mixed", (2, 2, 4)),
        ("adam", "bfloat16", (2, 2, 4)),
        ("adam", "megatron", (2, 4, 12)),
        ("adam", "autocast", (4, 4, 8)),
        ("rmsprop", "float64", (8, 8, 8)),
    ]:
        found = md.planner.memory(1, optimizer=optimizer, precision=precision, activations=5)
        names = ["parameters", "gradients", "optimizer states", "activations"]
        wanted = list(zip(names, [*each, 5], strict=True))
        assert list(found.categories.items()) == wanted, (optimizer, precision)
        assert found.total == sum(each) + 5


# ---- counted on ranks -------------------------------------------------------------------------

SHAPE = 64, 32, 16  # Ψ = 2608, which 2 and 4 ranks share without padding
OPTIMIZERS = {
    "adam": partial(torch.optim.Adam, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd": partial(torch.optim.SGD, lr=0.1),
}


def strategy(stage, make, dtype):
    """The model of a stage and its optimizer."""
    model = md.zoo.mlp(*SHAPE, dtype=dtype)
    if stage in (0, 3):
        model = (md.FullyShardedDataParallel if stage else md.DistributedDataParallel)(model)
        return model, make(model.parameters())
    own = md.ZeroRedundancyOptimizer(model.parameters(), make.func, **make.keywords)
    wrap = partial(md.ShardedDataParallel, optimizer=own)
    return (md.DistributedDataParallel if stage == 1 else wrap)(model), own


def counted(stage, optimizer, dtype):
    """On a rank, after two steps: the bytes that it holds, and how many numbers are counts."""
    model, own = strategy(stage, OPTIMIZERS[optimizer], dtype)
    with md.measure.MemoryTracker(model, own) as memory:
        for _ in range(2):
            own.zero_grad()
            model(torch.ones(3, 64, dtype=dtype)).sum().backward()
            own.step()
    states = [value for each in own.state.values() for value in each.values()]
    counts = sum(each.nbytes for each in states if torch.is_tensor(each) and not each.ndim)
    return memory.after("step"), counts


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_that_ranks_hold(pools, stage):
    for world_size in 2, 4:
        for optimizer in OPTIMIZERS:
            dtype = torch.float32 if optimizer == "adam" else torch.float64
            precision = str(dtype).removeprefix("torch.")
            planned = md.planner.memory(
                2608, world_size, stage, optimizer=optimizer, precision=precision
            ).categories
            for live, counts in pools(world_size)(counted, stage, optimizer, dtype):
                live["optimizer states"] -= counts
                assert {name: live[name] for name in planned} == planned, (world_size, optimizer)


# ---- the shape of a transformer ----------------------------------------------------------------

# Parameters of the released weights, as torch counts them; of GPT-3 and MT-NLG, as printed.
PUBLISHED = {
    "gpt-2": 124_439_808,
    "gpt-2-medium": 354_823_168,
    "gpt-2-large": 774_030_080,
    "gpt-2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
}


class Layer(nn.Module):
    """A layer as torch has it, to count its parameters and what autograd keeps of it."""

    def __init__(self, shape):
        super().__init__()
        h, self.shape = shape.width, shape
        self.head = h // shape.heads
        kv, f = self.head * (shape.kv_heads or shape.heads), shape.hidden or 4 * h
        bias, norm = not shape.llama, nn.RMSNorm if shape.llama else nn.LayerNorm
        self.norm1, self.norm2 = norm(h), norm(h)
        self.q, self.k, self.v = (nn.Linear(h, n, bias) for n in (h, kv, kv))
        self.out, self.up, self.down = (nn.Linear(a, b, bias) for a, b in ((h, h), (h, f), (f, h)))
        self.gate = nn.Linear(h, f, bias) if shape.llama else None

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (
            each(y).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        attended = self.stored(q, k, v) if self.is_stored else self.flash(q, k, v)
        dropout = partial(F.dropout, p=0.1 if self.shape.dropout else 0.0)
        x = x + dropout(self.out(attended.transpose(1, 2).flatten(2)))
        y = self.norm2(x)
        middle = F.silu(self.gate(y)) * self.up(y) if self.gate else F.gelu(self.up(y))
        return x + dropout(self.down(middle))

    is_stored = False

    def flash(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def stored(self, q, k, v):
        scores = torch.softmax(q @ k.transpose(-1, -2), -1)
        return (F.dropout(scores, 0.1) if self.shape.dropout else scores) @ v


def built(shape):
    """All of the model."""
    h, V = shape.width, shape.vocabulary
    model = nn.ModuleList([nn.Embedding(V, h), *(Layer(shape) for _ in range(shape.layers))])
    model.append(nn.RMSNorm(h) if shape.llama else nn.LayerNorm(h))
    if not shape.llama:
        model.append(nn.Embedding(shape.length, h))
    if not shape.tied:
        model.append(nn.Linear(h, V, bias=False))
    return model


def test_parameters_of_the_presets():
    for name, shape in planner.MODELS.items():
        if shape.experts:
            continue
        with torch.device("meta"):
            model = built(replace(shape, layers=2))
        two = sum(p.numel() for p in model.parameters())
        layer = sum(p.numel() for p in model[1].parameters())
        assert shape.parameters == two + (shape.layers - 2) * layer, name
        if name in PUBLISHED:
            assert shape.parameters == PUBLISHED[name], name
        else:
            assert f"{shape.parameters / 1e9:.0f}b" in (name.rpartition("-")[2])


# Billions, all and active, as the makers print them. Some leave the embedding out of the second.
EXPERTS = {
    "mixtral-8x7b": (46.7, 12.9, True),
    "olmoe-1b-7b": (6.9, 1.3, True),
    "qwen3-30b-a3b": (30.5, 3.3, True),
    "gpt-oss-120b": (116.8, 5.1, False),
    "deepseek-v3": (671, 36.6, False),
}


def test_parameters_of_models_with_experts():
    assert EXPERTS.keys() == {name for name, shape in planner.MODELS.items() if shape.experts}
    for name, (total, active, embedding) in EXPERTS.items():
        shape = planner.MODELS[name]
        assert shape.parameters / 1e9 == pytest.approx(total, rel=0.005), name
        used = shape.active_parameters - (0 if embedding else shape.vocabulary * shape.width)
        assert used / 1e9 == pytest.approx(active, rel=0.02), name
    norms = 48 * 2 * 128  # of each head's queries and keys
    assert planner.MODELS["qwen3-30b-a3b"].parameters + norms == 30_532_122_624  # torchtitan
    mixtral = planner.MODELS["mixtral-8x7b"]
    shared = replace(mixtral, shared=1, dense_layers=2)
    one, router = 3 * 4096 * 14336, 8 * 4096
    assert shared.parameters - mixtral.parameters == (30 + 2 * (2 + 1 - 8)) * one - 2 * router


def parameters_here(length, *shape):
    split = md.tensor_parallel.split(md.zoo.Transformer(97, length, *shape))
    parts = split.blocks[0], split.tokens, split.positions, split.norm
    return [sum(p.numel() for p in part.parameters()) for part in parts]


def test_parameters_of_a_tensor_rank(pools):
    shape, t = planner.Transformer(2, 32, 4, 16, 97), 4
    for rank, (layer, tokens, places, norm) in enumerate(pools(t)(parameters_here, 16, 32, 4, 2)):
        assert layer == shape.layer_parameters(t) - 3 * 32 // t  # the zoo's qkv has no bias
        assert norm == shape.head_parameters(t, tied=True)
        if rank == 0:  # 97 tokens: the first has one more
            assert tokens + places == shape.embedding_parameters(t)


# ---- activations -------------------------------------------------------------------------------

GPT_3 = planner.Transformer(layers=96, width=12288, heads=96, dropout=True)
MT_NLG = planner.Transformer(layers=105, width=20480, heads=128, dropout=True)


def test_activations_of_a_transformer():
    """arXiv 2205.05198, Table 2; its section 5: 5as/h is 80 for GPT-3 and 64 for MT-NLG, and to
    compute attention again saves 70% and 65%."""
    for model, scores, saved in (GPT_3, 80, 0.70), (MT_NLG, 64, 0.65):
        sbh = 2048 * 3 * model.width
        stored = planner.Layout(8, micro_batch=3, stored_attention=True)
        of = partial(layer_activations, model)
        assert of(stored) == pytest.approx(sbh * (34 + scores))
        cut = replace(stored, tensor=8)
        assert of(cut) == pytest.approx(sbh * (10 + 24 / 8 + scores / 8))
        both = replace(cut, sequence_parallel=True)
        assert of(both) == pytest.approx(sbh * (34 / 8 + scores / 8))
        flash = replace(both, stored_attention=False)
        assert of(flash) == pytest.approx(sbh * 34 / 8)
        kept = partial(kept_activations, model)
        assert kept(replace(both, recompute="attention")) == pytest.approx(of(flash))
        assert kept(replace(cut, recompute="layers")) == 2 * sbh
        assert kept(replace(both, recompute="layers")) == 2 * sbh / 8
        assert 1 - of(replace(stored, stored_attention=False)) / of(stored) == pytest.approx(
            saved, abs=0.006
        )


def saved_by_autograd(module, x):
    """Bytes that `module` keeps for backward, of its inputs too, but not its parameters."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = module(x)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), out


LAYERS = {
    "gpt": planner.Transformer(1, 64, 4, 32, 256),
    "gpt with dropout": planner.Transformer(1, 64, 4, 32, 256, dropout=True),
    "llama": planner.Transformer(1, 64, 8, 32, 256, kv_heads=2, hidden=160, llama=True),
}


def test_what_autograd_keeps_of_a_layer():
    kinds = [("gpt", 0), ("gpt", 1), ("gpt with dropout", 0), ("gpt with dropout", 1), ("llama", 0)]
    for name, stored in kinds:
        shape = LAYERS[name]
        layer = Layer(shape)
        layer.is_stored = stored
        x = torch.randn(3, 32, 64, requires_grad=True)
        layout = planner.Layout(micro_batch=3, stored_attention=stored)
        planned = layer_activations(shape, layout, "float32")
        tokens, a = 3 * 32, shape.heads
        small = 2 * 2 * 4 * tokens  # each layer norm's mean and deviation
        if shape.llama:  # RMS norms that are not fused, as on a CPU, keep their unweighted result
            small = 2 * (4 + 4 * shape.width) * tokens
        small += 0 if stored else 4 * a * tokens  # flash attention's sums of exponentials
        if shape.dropout:  # torch keeps a mask of numbers, not of bytes, behind dropout on a CPU
            small += 3 * 2 * 64 * tokens + (3 * a * 32 * tokens if stored else 0)
        assert saved_by_autograd(layer, x)[0] == planned + small, (name, stored)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_loss_of_eager_torch(precision):
    """Of the last norm's output on: the tokens' words are the largest there is."""
    T, h, V = 64, 16, 5000
    shape = planner.Transformer(1, h, 2, T, V)
    head = nn.Linear(h, V, bias=False).to(getattr(torch, precision))
    x, y = torch.randn(T, h, dtype=head.weight.dtype), torch.randint(V, (T,))
    with md.measure.MemoryTracker(head) as memory:
        scores = head(x)
        F.cross_entropy(scores.float(), y).backward()
    counted = memory.peak - head.weight.nbytes
    c = head.weight.element_size()
    planned = logits(shape, planner.Layout(), precision) - 2 * c * T * h  # norm and head: not here
    assert counted == pytest.approx(planned, rel=1e-3)


@pytest.mark.parametrize(("vocabulary", "recompute"), [(64, "nothing"), (8192, "layers")])
def test_the_peak_of_a_step(vocabulary, recompute):
    """With few tokens in the vocabulary layers decide, with many the loss."""
    shape = planner.Transformer(6, 64, 4, 128, vocabulary)
    model = md.zoo.Transformer(vocabulary, 128, 64, 4, 6)
    if recompute == "layers":
        model.blocks = nn.Sequential(*map(md.checkpoint_wrapper, model.blocks))
    optimizer = torch.optim.Adam(model.parameters())
    tokens = torch.randint(vocabulary, (4, 128))
    for _ in range(2):  # the first makes the optimizer's states
        with md.measure.MemoryTracker(model, optimizer) as memory:
            scores = model(tokens).flatten(0, 1)
            F.cross_entropy(scores, tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    layout = planner.Layout(micro_batch=4, recompute=recompute)
    planned = planner.peak(shape, layout, precision="float32")
    # The planner has all gradients there at once; here they come one by one, as memory is freed.
    assert planned.total - planned.gradients < 1.02 * memory.peak
    assert planned.total > 0.98 * memory.peak


def peak_of_fsdp(units):
    model = md.zoo.Transformer(*units)
    wrapped = md.FullyShardedDataParallel(model, auto_wrap_policy=by_class(md.zoo.Block))
    tokens = torch.zeros(1, units[1], dtype=torch.long)
    for _ in range(2):  # the first finds out the order of the units
        with md.measure.MemoryTracker(wrapped) as memory:
            wrapped(tokens).sum().backward()
    return memory.peak, memory.peak_of["parameters"], memory.after("backward")["parameters"]


def test_the_units_of_zero_3(pools):
    """A step whose batch is so small that parameters and gradients are all there is."""
    shape = planner.Transformer(6, 64, 2, length=2, vocabulary=64)
    ranks = pools(4)(peak_of_fsdp, (64, 2, 64, 2, 6))
    layout = planner.Layout(4, stage=3)
    planned = planner.peak(shape, layout, optimizer="sgd", precision="float32")
    biases = 4 * 3 * 64  # of qkv, which the zoo has not
    for peak, whole, shards in ranks:
        ends = 4 * 2 * 64  # the last norm, in the root too
        assert whole - shards == planned.copies / 2 - 2 * biases + ends
        # Here a second reduce_scatter may be on its way, and pieces that it has made.
        assert 1 < peak / planned.total < 1.3


# ---- what is sent ------------------------------------------------------------------------------


def calls_of_a_step(stage):
    model, own = strategy(stage, OPTIMIZERS["sgd"], torch.float64)
    for _ in range(3):
        with md.measure.TrafficCounter() as traffic:
            model(torch.ones(3, 64, dtype=torch.float64)).sum().backward()
            own.step()
            own.zero_grad()
    return traffic.calls


def sent(calls, world_size):
    each = [cost(op, ALGORITHMS[op][0], world_size, n) for op, (_, n) in calls.items()]
    return sum(one.nbytes for one in each)


def test_traffic_is_what_a_step_sends(pools):
    for stage in range(4):
        planned = md.planner.traffic(2608, 4, stage, precision="float64")
        flags = 2 * 3 / 4 * 4 if stage == 3 else 0  # and who has gradients of the unit
        calls = pools(4)(calls_of_a_step, stage)[0]
        assert sent(calls, 4) == pytest.approx(planned + flags, rel=1e-12), stage


def test_traffic():
    """ZeRO, section 7: 2Ψ, 2Ψ, 3Ψ; here with (N-1)/N, and stage 1 after an all_reduce."""
    assert [md.planner.traffic(100, 4, stage, precision="float32") for stage in range(4)] == [
        pytest.approx(4 * 100 * times * 3 / 4) for times in (2, 3, 2, 3)
    ]
    assert md.planner.traffic(100, 1, 3) == 0
    assert md.planner.traffic(100, 4) == 300  # mixed: gradients of 2 bytes
    assert md.planner.traffic(100, 2, precision="megatron") == 400
    # FSDP with autocast: gathered in 2 bytes, reduced in 4.
    assert md.planner.traffic(100, 2, 3, precision="autocast") == (2 + 2 + 4) * 100 / 2


def calls_of_tensor_parallel(sequence_parallel):
    model = md.zoo.Transformer(64, 16, 32, 4, 3)
    split = md.tensor_parallel.parallelize_module(model, sequence_parallel=sequence_parallel)
    blocks = split.blocks
    x = torch.randn(2, 16 // (dist.get_world_size() if sequence_parallel else 1), 32)
    x.requires_grad_()
    with md.measure.TrafficCounter() as traffic:
        blocks(x).sum().backward()
    return traffic.calls


def test_what_travels_along_tensor(pools):
    """Four all_reduces of the activations a layer. With sequence parallel as many bytes, but for
    the inputs of both parts, which backward gathers again; and the small gradients of what every
    rank has a copy of."""
    world_size, activation = 4, 2 * 16 * 32 * 4
    ring = partial(md.collectives.cost, "all_reduce", "ring", world_size)
    planned = 3 * 4 * ring(activation).nbytes
    calls = pools(world_size)(calls_of_tensor_parallel, False)[0]
    assert sent(calls, world_size) == planned
    calls = pools(world_size)(calls_of_tensor_parallel, True)[0]
    again = 3 * 2 * ring(activation).nbytes / 2
    copied = calls.pop("all_reduce", (0, 0))[1]
    assert sent(calls, world_size) in (planned, planned + again), calls
    assert copied <= 3 * 4 * 32 * 6


# ---- pipelines ---------------------------------------------------------------------------------


def test_micro_batches_in_flight():
    for p, m in (1, 3), (2, 2), (4, 3), (4, 8), (8, 16):
        layout = planner.Layout(p, pipeline=p, micro_batches=m)
        predicted = simulate(SCHEDULES["1f1b"](p, m)).in_flight
        assert [layout.in_flight(stage) for stage in range(p)] == predicted, (p, m)
        if m % p == 0 and p > 1:
            twice = replace(layout, chunks=2)
            predicted = simulate(SCHEDULES["interleaved"](p, m, 2)).in_flight
            assert [2 * twice.in_flight(stage) for stage in range(p)] == predicted, (p, m)


def test_the_bubble():
    """Of equal stages, as the schedules of the course have it."""
    for p, m, v in (4, 8, 1), (4, 8, 2), (2, 6, 3):
        shape = planner.Transformer(p * v, 64, 4, vocabulary=1)
        free = planner.Device(1e12, 1e9, md.Link(math.inf))
        took = planner.step_time(shape, planner.Layout(p, 1, p, micro_batches=m, chunks=v), free)
        schedule = SCHEDULES["interleaved"](p, m, v) if v > 1 else SCHEDULES["1f1b"](p, m)
        total = simulate(schedule, 1 / v, 2 / v, 0).time
        assert took.total / took.compute == pytest.approx(total / (3 * m), rel=1e-3), (p, m, v)


def sent_in_a_pipeline(microbatches, chunks):
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, bias=False) for _ in range(4)]
    schedule = "1f1b" if chunks == 1 else "interleaved"
    model = md.Pipeline(nn.Sequential(*layers), microbatches, schedule)
    x = torch.randn(2 * microbatches, 8)
    for _ in range(2):  # the first finds out what travels
        with md.measure.TrafficCounter() as traffic:
            model.train_step(x, x, F.mse_loss)
    return traffic.sent_bytes


@pytest.mark.parametrize("chunks", [1, 2])
def test_what_travels_along_a_pipeline(pools, chunks):
    """Between two ranks: forward once a stage but the last, and as much back."""
    m, shape = 4, planner.Transformer(4, 8, 2, length=1, vocabulary=1)
    counted = sum(pools(2)(sent_in_a_pipeline, m, chunks))
    device = planner.Device(1e12, 1e9, md.Link(8, 0))  # a byte takes a nanosecond
    layout = planner.Layout(2, 1, 2, micro_batch=2, micro_batches=m, chunks=chunks)
    planned = 1e9 * planner.step_time(shape, layout, device, "float32").pipeline
    # The plan is of a rank in the middle, which sends on what each of its chunks gives; here, of
    # 2 × chunks stages, the last one's outputs stay, and the first one's gradients.
    assert counted == pytest.approx(planned * (2 * chunks - 1) / chunks)


def test_stages_are_as_equal_as_can_be():
    """The head of Llama 3 is worth more than two layers; that of GPT-3, not half a one."""
    llama = planner.MODELS["llama-3-8b"]
    assert llama.head_flops > 2 * llama.layer_flops / 1.5
    assert [each.layers for each in stages(llama, planner.Layout(4, 1, 4))] == [8, 8, 9, 7]
    gpt = stages(planner.MODELS["gpt-3-175b"], planner.Layout(8, 1, 8))
    assert [each.layers for each in gpt] == [12] * 8
    assert [(each.first, each.last) for each in gpt[:2]] == [(True, False), (False, False)]
    whole = sum(each.parameters(llama) for each in stages(llama, planner.Layout(4, 1, 4)))
    assert whole == llama.parameters
    tied = planner.MODELS["gpt-2"]
    twice = sum(each.parameters(tied) for each in stages(tied, planner.Layout(2, 1, 2)))
    assert twice == tied.parameters + tied.vocabulary * tied.width


# ---- time --------------------------------------------------------------------------------------


TINY = planner.Transformer(1, 96, 4, 12, 69)  # all parameters have a multiple of 3 rows


def test_a_ring_shares_the_cable_of_its_node():
    """Two nodes of four, 1 GB/s within and 4 GB/s between them."""
    device = planner.Device(1e12, 1e9, md.Link(8, 5, inter=md.Link(32, 20)), per_node=4)
    ring = partial(device.ring, "all_gather", nbytes=8e9)
    assert ring(4) == pytest.approx(6.0, rel=1e-4)  # in a node
    assert ring(8) == pytest.approx(7 / 8 * 8 / 4, rel=1e-3)  # one ring has the cable
    assert ring(2, stride=4) == pytest.approx(1 / 2 * 8 / 1, rel=1e-3)  # four rings share it
    assert ring(4, stride=2) == pytest.approx(3 / 4 * 8 / 2, rel=1e-3)
    assert device.send(1e9, stride=1, ranks=4) == pytest.approx(1, rel=1e-4)
    assert device.send(1e9, stride=4, ranks=2) == pytest.approx(1, rel=1e-4)
    assert device.send(1e9, stride=1, ranks=8) == pytest.approx(1 / 4, rel=1e-3)


NARAYANAN = planner.Transformer(4, 64, 4, 128, 256)


def test_step_time():
    shape, m = NARAYANAN, 3
    device = planner.Device(1e12, 1e9, md.Link(8, 10), utilisation=0.5)
    layout = planner.Layout(2, micro_batch=2, micro_batches=m, stored_attention=True)
    took = planner.step_time(shape, layout, device, "float32")
    # Narayanan et al. (arXiv 2104.04473), section 5.1, without recomputation
    B, s, L, h, V = 2, 128, 4, 64, 256
    flops = 72 * B * s * L * h**2 * (1 + s / (6 * h) + V / (12 * L * h))
    assert took.compute == pytest.approx(m * flops / 0.5e12)
    assert shape.flops * B * s == pytest.approx(flops)
    ring = partial(md.collectives.cost, world_size=2, algorithm="ring")
    units = [h * (V + s), *[12 * h**2 + 13 * h] * L, 2 * h]  # embeddings, layers, the last norm
    assert sum(units) == shape.parameters
    first, *rest = [ring("all_reduce", nbytes=4 * n).seconds(1e-5, 1e-9) for n in units]
    each, backward = first + sum(rest), took.compute / m * 2 / 3
    assert took.data == pytest.approx(each)
    assert took.hidden == pytest.approx(min(sum(rest), backward))  # the first unit's come last
    assert took.communication == took.data - took.hidden
    assert took.total == took.compute + took.communication
    one = planner.step_time(shape, replace(layout, stage=1), device, "float32")
    assert one.data == pytest.approx(each)  # as Megatron sends it, and with its overlaps
    forward = min(sum(rest) / 2, backward / 2)
    assert one.hidden == pytest.approx(min(sum(rest) / 2, backward) + forward)
    for stage, times in (2, m), (3, m):  # nobody can keep whole gradients
        found = planner.step_time(shape, replace(layout, stage=stage), device, "float32").data
        half = each / 2
        assert found == pytest.approx(half * times + half * (1 if stage == 2 else 2 * m))
    full = planner.step_time(shape, replace(layout, recompute="layers"), device, "float32")
    assert full.compute > 4 / 3 * took.compute * 0.95
    tensor = planner.step_time(shape, replace(layout, tensor=2), device, "float32")
    message = ring("all_reduce", nbytes=4 * B * s * h).seconds(1e-5, 1e-9)
    assert tensor.tensor == pytest.approx(m * L * 4 * message)
    assert tensor.compute == pytest.approx(took.compute / 2) and tensor.data == 0
    again = replace(layout, tensor=2, recompute="layers")  # with the all_reduces of forward
    found = planner.step_time(shape, again, device, "float32").tensor
    assert found == pytest.approx(m * L * 6 * message)


def test_what_fsdp_hides():
    """A device that computes slowly hides all but the first gather and the last reduction; one that
    computes at once, nothing."""
    shape, layout = NARAYANAN, planner.Layout(4, stage=3, micro_batches=2)
    link = md.Link(8, 10)
    slow, fast = (planner.Device(flops, 1e9, link, per_node=4) for flops in (1e9, 1e24))
    took = planner.step_time(shape, layout, slow, "float32")
    first = slow.ring("all_gather", 4, 4 * shape.embedding_parameters())
    assert took.communication == pytest.approx(2 * 2 * first)  # each micro-batch: gather, reduce
    at_once = planner.step_time(shape, layout, fast, "float32")
    assert at_once.communication == pytest.approx(at_once.data) == pytest.approx(took.data)
    kept = planner.step_time(shape, replace(layout, reshard_after_forward=False), fast, "float32")
    assert kept.data == pytest.approx(took.data / 3)  # gathered once, reduced once, not 2 × 3


def test_latency_of_a_ring_over_nodes():
    """As NCCL's own model has it (src/graph/tuning.cc): of N - 1 steps, one leaves for each other
    node."""
    device = planner.GPUS["h100"]
    within, between = (each * 1e-6 for each in planner.LATENCY_US)
    for nodes in 1, 2, 128:
        steps = (nodes - 1) * between + (8 * nodes - nodes) * within
        assert device.ring("all_gather", 8 * nodes, 0) == pytest.approx(steps)
    alone = device.ring("all_gather", 128, 0, stride=8)  # one of each node
    assert alone == pytest.approx(127 * between)
    tree = device.collective("all_reduce", 1024, 0)
    assert tree == pytest.approx(2 * (7 * within + 7 * between))
    assert device.collective("all_reduce", 8, 1e9) == device.ring("all_reduce", 8, 1e9)


def test_causal_attention_takes_half_the_time():
    """Flash attention: of 2 products forward and 5 backward (arXiv 2307.08691, section 3.1), half;
    stored scores: of 2 and 4, all."""
    shape = replace(NARAYANAN, length=8192)
    device = planner.Device(1e12, 1e9, md.Link(8))
    flash, stored = (
        planner.step_time(shape, planner.Layout(stored_attention=each), device).compute
        for each in (False, True)
    )
    fast = replace(device, utilisation=0.8, attention=0.4)  # slower than matrices
    took = planner.step_time(shape, planner.Layout(), fast).compute
    product = 2 * shape.length**2 * shape.width * shape.layers / 1e12
    assert stored - flash == pytest.approx(6 * product - 7 * product / 2)
    assert took == pytest.approx((stored - 6 * product) / 0.8 + 7 * product / 2 / 0.4)


def test_the_optimizers_time():
    """28 bytes a parameter with Adam, in float32 as in mixed precision; less where they are shared
    out: so stage 1 may take less time than DDP."""
    touched = {
        (optimizer, name): each.touched(optimizer)
        for optimizer in ("adam", "sgd")
        for name, each in planner.PRECISIONS.items()
    }
    assert touched["adam", "mixed"] == touched["adam", "float32"] == 28
    assert touched["sgd", "float32"] == 12
    shape, device = planner.MODELS["llama-3-8b"], planner.GPUS["h100"]
    took = [planner.step_time(shape, planner.Layout(8, stage=n), device) for n in range(4)]
    assert took[0].optimizer == pytest.approx(28 * shape.parameters / 3.35e12)
    assert took[1].optimizer == pytest.approx(took[0].optimizer / 8) == took[3].optimizer
    assert took[1].total < took[0].total


def test_copies_of_the_shards():
    """Hybrid sharding: shards of 8 ranks, on 4 nodes. Gradients are reduced in a node, then the
    shards averaged over nodes."""
    shape, device = planner.MODELS["llama-3-8b"], planner.GPUS["h100"]
    layout = planner.Layout(32, stage=3, replicate=4)
    assert layout.shards == 8 and replace(layout, stage=1).shards == 32
    held = planner.peak(shape, layout)
    assert held == planner.peak(shape, planner.Layout(8, stage=3))
    took, alone = (
        planner.step_time(shape, replace(layout, world_size=n, replicate=n // 8), device).data
        for n in (32, 8)
    )
    (whole,) = stages(shape, planner.Layout())
    averaged = sum(
        times * device.collective("all_reduce", 4, 2 * size / 8, stride=8)
        for size, times in whole.units(shape)
    )
    assert took - alone == pytest.approx(averaged)


def test_context_parallel():
    """Ranks that share a sequence have its tokens' part, and gather keys and values."""
    shape, device = planner.MODELS["llama-3-8b"], planner.GPUS["h100"]
    layout = planner.Layout(8, stage=3)
    shared, alone = planner.Layout(8, stage=3, context=4), replace(layout, micro_batch=1)
    assert (shared.data, shared.shards, shared.sequences) == (2, 8, 2)
    quarter, whole = (planner.peak(shape, each) for each in (shared, alone))
    assert quarter.parameters == whole.parameters
    assert quarter.activations == pytest.approx(whole.activations / 4)
    assert quarter.logits == pytest.approx(whole.logits / 4)
    took = planner.step_time(shape, shared, device)
    keys = 2 * 1024 * 8192 * 2  # keys and values of a sequence, bytes
    assert took.context == pytest.approx(32 * 3 * device.ring("all_gather", 4, keys))
    assert took.compute == pytest.approx(planner.step_time(shape, alone, device).compute / 4)
    with pytest.raises(ValueError, match="8191 tokens cannot be shared by 4 ranks"):
        planner.peak(replace(shape, length=8191), shared)


def test_what_is_recomputed():
    """From nothing to whole layers each way keeps less; what it costs stands beside it."""
    device = planner.Device(1e12, 1e9, md.Link(8))
    for name, shape in LAYERS.items():
        kept, seconds = [], []
        for how in "nothing", "elementwise", "operations", "layers":
            layout = planner.Layout(recompute=how)
            kept.append(kept_activations(shape, layout))
            seconds.append(planner.step_time(shape, layout, device).compute)
        assert kept == sorted(kept, reverse=True) and len(set(kept)) == 4, name
        assert seconds[0] == seconds[1] < seconds[2] < seconds[3], name
        h, kv, f = shape.width, shape.kv_width(), shape.mlp_width
        masks = 2 * h if shape.dropout else 0
        mlp = 2 * f if shape.llama else f
        assert kept[1] == 32 * (2 * (4 * h + 2 * kv + mlp) + masks), name
        # torchtitan: input, attention's output, and every second product: q, v, gate, down
        assert kept[2] == 32 * 2 * (3 * h + kv + f + (h if shape.llama else 0)), name
        again = kv + h + (f if shape.llama else 0)  # k, out and up
        assert (seconds[2] - seconds[0]) * 1e12 == pytest.approx(32 * 2 * h * again), name


# ---- advice ------------------------------------------------------------------------------------

RECIPE = {"optimizer": "adam", "precision": "mixed"}


def advised(name, layout, gpu="h100", **recipe):
    return fastest(planner.MODELS[name], layout, planner.GPUS[gpu], **RECIPE | recipe)


ASKED = {
    "8B, accumulated": ("llama-3-8b", planner.Layout(8, micro_batches=16)),
    "8B, 5% slower": ("llama-3-8b", planner.Layout(8, 2, stage=2)),
    "8B, long": ("llama-3-8b", planner.Layout(64, 8, micro_batches=2)),
    "stored attention": ("gpt-3-175b", planner.Layout(64, 8, 8, stored_attention=True)),
}


def test_the_fastest_layout_fits_and_has_the_same_batch():
    device = planner.GPUS["h100"]
    for name, (model, layout) in ASKED.items():
        shape, best = planner.MODELS[model], advised(model, layout)
        assert best.sequences == layout.sequences and best.world_size == layout.world_size, name
        assert fits(shape, best, device, **RECIPE), name
        assert not best.stored_attention, name
        least = planner.step_time(shape, best, device).total
        stages_of_zero = [replace(layout, stage=n) for n in range(4)]
        again = [replace(each, recompute="layers") for each in stages_of_zero]
        for other in stages_of_zero + again:
            if fits(shape, other, device, **RECIPE):
                assert least <= planner.step_time(shape, other, device).total * (1 + ALIKE), name


# ---- python -m minidist plan ------------------------------------------------------------------


def plan(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["minidist", "plan", *arguments])
    try:
        main()
    except SystemExit as ended:
        assert ended.code == 2
    return capsys.readouterr()


def row(text, name):
    return [line.split()[1:] for line in text.splitlines() if line.split()[:1] == [name]][0]


EIGHT = "--model llama-3-8b --gpu h100 --world-size 8"


def test_the_command_with_a_model(monkeypatch, capsys):
    said = plan(monkeypatch, capsys, *f"{EIGHT} --tensor 2".split()).out
    assert said.startswith(
        "llama-3-8b: 8.03 billion parameters on 8 ranks = data 4 × pipeline 1 × tensor 2\n"
        "A step: 4 sequences of 8,192 tokens; on each replica 1 × 1\n"
    )
    assert row(said, "DDP")[:3] == ["8.03", "8.03", "48.2"]
    assert [row(said, name)[-4] for name in planner.STAGES.values()] == ["no", "yes", "yes", "yes"]
    assert "at 65% of 989 TFLOP/s" in said
    slower = plan(monkeypatch, capsys, *f"{EIGHT} --utilisation 0.15 --gbps 4 1".split()).out
    assert "at 15% of 989 TFLOP/s" in slower and "0.5 GB/s and 3.4 µs between" in slower
    assert float(row(slower, "DDP")[-3]) > 3 * float(row(said, "DDP")[-3])
    own = plan(monkeypatch, capsys, *f"{EIGHT} --flops 500e12 --memory 40 --stage 0".split()).out
    assert "of 500 TFLOP/s" in own and "36.8 can be used" in own


def test_one_advice_a_page(monkeypatch, capsys):
    """As fast as any that fits, of the same batch, as flags; and the one step, taken apart."""
    for asked in "--tensor 8", "--pipeline 2", "--tensor 2 --stage 2":
        said = plan(monkeypatch, capsys, *f"{EIGHT} {asked}".split()).out
        assert said.count("fastest that fits") == said.count("A step takes") == 1, asked
        (flags,) = [each for each in said.splitlines() if each.startswith("    --")]
        again = plan(monkeypatch, capsys, *f"--model llama-3-8b {flags}".split()).out
        assert f"is within {ALIKE:.0%} of the fastest that fits, with the same" in again, asked
        (told,) = [each for each in again.splitlines() if each.startswith("A step takes")]
        assert f"± {ERROR:.0%}" in told and told in said  # what the flags give is what was said


def test_the_command_where_nothing_fits(monkeypatch, capsys):
    said = plan(monkeypatch, capsys, *"--model llama-3-405b --world-size 8".split()).out
    assert said.endswith("Nothing fits with the same 8 sequences a step: take more ranks.\n")


def test_the_command_with_a_shape(monkeypatch, capsys):
    shape = "--layers 2 --width 64 --heads 4 --length 16 --micro-batch 3 --precision float32"
    said = plan(monkeypatch, capsys, *shape.split()).out
    model = planner.Transformer(2, 64, 4, 16)
    assert f"{model.parameters / 1e9:,.4g} billion" in said
    found = planner.peak(model, planner.Layout(micro_batch=3), precision="float32")
    assert float(row(said, "DDP")[3]) == pytest.approx(found.activations / 1e9, rel=0.01)
    piped = plan(monkeypatch, capsys, *f"{shape} --world-size 2 --pipeline 2".split()).out
    assert "on each replica 8 × 3" in piped and "bubble" in piped


DEVICE = planner.GPUS["h100"]
MISTAKES = [
    (lambda: planner.memory(1e9, 0), "from 1 on, not 0"),
    (lambda: planner.memory(1e9, 2, 4), "stage must be one of 0, 1, 2, 3, not 4"),
    (lambda: planner.memory(-1, 2), "more than 0 parameters, not -1"),
    (lambda: planner.memory(1, optimizer="lion"), "one of sgd, .* not 'lion'"),
    (lambda: planner.memory(1, precision="fp16"), "one of mixed, .* not 'fp16'"),
    (lambda: planner.Device(0, 1, md.Link(1)), "more than 0 FLOP/s"),
    (lambda: replace(DEVICE, utilisation=2), "above 0 and 1 at most, not 2"),
    (lambda: planner.Transformer(2, 10, 3), "cannot be shared by 3 heads"),
    (lambda: planner.Transformer(2, 12, 4, kv_heads=3), "4 heads cannot share 3"),
    (lambda: planner.Transformer(1, 4, 2, experts=2, active=3, llama=True), "uses 3 of 2 experts"),
    (lambda: planner.Transformer(0, 10, 2), "layers must be a whole number"),
    (lambda: planner.Layout(recompute="all"), "recompute must be one of"),
    (lambda: planner.Layout(8, 3), "8 ranks are no multiple of tensor 3 × pipeline 1"),
    (lambda: planner.peak(TINY, planner.Layout(3, 3)), "4 heads.* cut by tensor 3"),
    (lambda: planner.peak(TINY, planner.Layout(2, 1, 2)), "1 layers are too few"),
]
AT_THE_COMMAND_LINE = {
    "": "which model",
    "--layers 3": "Say --model, or --layers, --width and --heads",
    "--model gpt-2 --memory 0": "more than 0 FLOP/s, memory",
    "--model gpt-5": "there is no model gpt-5, but gpt-2, ",
    "--model mixtral-8x7b": "the planner only counts parameters",
    "--model gpt-2 --world-size 6 --tensor 4": "no multiple of tensor 4",
    "--model gpt-2 --gbps 1 2 3": "one number or two",
    "--model gpt-2 --recompute attention": "flash attention stores no scores",
    "--model gpt-2 --world-size 2 --stage 1 --replicate 2": "are of --stage 3",
    "--model gpt-2 --world-size 3 --context 3": "1024 tokens cannot be shared by 3",
    "--model gpt-2 --world-size 2 --replicate 3": "2 ranks cannot hold 3 copies",
}


def test_mistakes(monkeypatch, capsys):
    for fault, words in MISTAKES:
        with pytest.raises(ValueError, match=words):
            fault()
    for arguments, words in AT_THE_COMMAND_LINE.items():
        assert words in plan(monkeypatch, capsys, *arguments.split()).err, arguments
