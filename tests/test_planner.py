"""The planner, against the ZeRO paper's table cell by cell, other papers' and teams' published
numbers, and what is counted in real steps: bytes that are held, kept for backward, and sent."""

import math
import sys
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import minidist as md
from minidist.__main__ import main
from minidist.collectives import ALGORITHMS, cost
from minidist.fully_sharded import by_class
from minidist.instruments import planner
from minidist.instruments.planner.advice import ALIKE, ERROR, fastest, fits
from minidist.instruments.planner.layout import stages
from minidist.instruments.planner.peak import kept_activations, layer_activations, logits
from minidist.pipeline import SCHEDULES, simulate

TABLE_1 = """
   1  120  120  120   2048 2048 2048  16000 16000 16000
   4 52.5 41.3   30    896  704  512   7000  5500  4000
  16 35.6 21.6  7.5    608  368  128   4750  2875  1000
  64 31.4 16.6 1.88    536  284   32   4187  2218   250
 256 30.4 15.4 0.47    518  263    8   4046  2054  62.5
1024 30.1 15.1 0.12    513  257    2   4011  2013  15.6
"""  # ranks; GB a rank in stages 1, 2 and 3, of 7.5 billion parameters, 128 billion, a trillion


def test_table_1_of_the_zero_paper():
    """To the last digit that is printed: half a unit of it if rounded, one if cut off."""
    for line in TABLE_1.strip().splitlines():
        ranks, *row = line.split()
        for place, printed in enumerate(row):
            P, N, stage = (7.5e9, 128e9, 1e12)[place // 3], int(ranks), place % 3 + 1
            ours = md.planner.memory(P, N, stage).total / 1e9
            formula = {1: 4 * P + 12 * P / N, 2: 2 * P + 14 * P / N, 3: 16 * P / N}[stage]
            assert ours == pytest.approx(formula / 1e9, rel=1e-12), (N, P, stage)
            unit = 10.0 ** -len(printed.partition(".")[2])
            if P == 7.5e9:
                assert abs(ours - float(printed)) <= 0.501 * unit, (N, stage)
            else:
                assert 0 <= ours - float(printed) < unit, (N, P, stage)


def test_figure_1_of_the_zero_paper():
    found = [md.planner.memory(7.5e9, 64, stage) for stage in range(4)]
    assert [round(each.total / 1e9, 1) for each in found] == [120, 31.4, 16.6, 1.9]
    assert [round(each.parameters / 1e9, 2) for each in found] == [15, 15, 15, 0.23]
    assert [round(each.gradients / 1e9, 2) for each in found] == [15, 15, 0.23, 0.23]
    assert [round(each.optimizer_states / 1e9, 2) for each in found] == [90, 1.41, 1.41, 1.41]


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


# ---- what fits --------------------------------------------------------------------------------


def test_largest_model():
    assert md.planner.largest_model(32e9) == 2e9  # 16 bytes each
    assert md.planner.largest_model(32e9, 64, 3) == 128e9  # as in Table 1
    assert md.planner.largest_model(32e9, precision="float32", optimizer="sgd") == 4e9
    assert md.planner.largest_model(33e9, activations=1e9) == 2e9
    assert md.planner.largest_model(33.9) == 2
    with pytest.raises(ValueError, match="no model fits in a memory of 15 bytes"):
        md.planner.largest_model(15)
    with pytest.raises(ValueError, match="of 3,200 bytes, of which activations take 3,199"):
        md.planner.largest_model(3200, activations=3199)


def test_smallest_world_size():
    assert md.planner.smallest_world_size(120e9, 7.5e9) == 1
    assert md.planner.smallest_world_size(32e9, 7.5e9) == 4  # 30 GB each, Table 1
    assert md.planner.smallest_world_size(1e9, 7.5e9) == 120
    assert md.planner.smallest_world_size(32e9, 7.5e9, 1) == 45  # 30 + 90/N
    assert md.planner.smallest_world_size(80e9, 7.5e9, 0, optimizer="sgd") == 1
    with pytest.raises(ValueError, match="ZeRO-1 fits on no number of ranks: each holds 30,000,"):
        md.planner.smallest_world_size(30e9, 7.5e9, 1)
    with pytest.raises(ValueError, match="DDP fits on no number of ranks"):
        md.planner.smallest_world_size(80e9, 7.5e9, 0)


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
    "mixtral-8x22b": (141, 39, True),
    "olmoe-1b-7b": (6.9, 1.3, True),
    "qwen3-30b-a3b": (30.5, 3.3, True),
    "qwen3-235b-a22b": (235, 22, True),
    "gpt-oss-20b": (20.9, 3.6, False),
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
    # By hand: Mixtral's flops are those of a dense model with an MLP of two experts' width.
    mixtral = planner.MODELS["mixtral-8x7b"]
    dense = replace(mixtral, experts=0, active=1, hidden=2 * 14336)
    assert mixtral.flops == dense.flops + 3 * 32 * 2 * 8 * 4096  # the router
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
        for optimizer in ("adam", "sgd", "adam8bit")
        for name, each in planner.PRECISIONS.items()
    }
    assert touched["adam", "mixed"] == touched["adam", "float32"] == 28
    assert touched["sgd", "float32"] == 12 and touched["adam8bit", "autocast"] == 12 + 4 + 4 / 64
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


GROUPED = planner.Transformer(1, 48, 12, 32, 64, kv_heads=2)  # of keys and values, 2,048 bytes


def along_context(way, flops=math.inf, ranks=4, shape=GROUPED, **others):
    """Nanoseconds of a step: on a line that carries a byte in each."""
    layout = planner.Layout(ranks, context=ranks, context_attention=way, **others)
    device = planner.Device(flops, 1e9, md.Link(8, 0))
    return 1e9 * planner.step_time(shape, layout, device, "float32").context


def test_how_keys_go_round():
    """By hand, b = 256 numbers: 6bf and 4bf; in Ulysses 12 heads of queries and 2 of keys that four
    ranks share, 2bf/4 (6 + 2) each way. Layers that are computed again send forward again."""
    bytes_of = {"gathered": 4608, "gathered once": 3072, "ring": 4608, "ulysses": 6144}
    assert {way: along_context(way) for way in planner.CONTEXT_ATTENTION} == pytest.approx(bytes_of)
    again = {"gathered": 6144, "gathered once": 4608, "ring": 6144, "ulysses": 9216}
    found = {way: along_context(way, recompute="layers") for way in again}
    assert found == pytest.approx(again)
    assert {along_context(way, ranks=1) for way in again} == {0}
    nodes = planner.Device(1, 1, md.Link(8e3, 0, inter=md.Link(8, 0)), per_node=2)
    assert nodes.exchange(4, 100) == pytest.approx(2 * 50e-9)  # two ranks, each half to the other
    kept = {
        way: layer_activations(
            GROUPED, planner.Layout(4, context=4, context_attention=way), "float32"
        )
        for way in again
    }
    more = {way: kept[way] - kept["gathered"] for way in again}  # 8 tokens, 4 bytes
    # The others' keys; a second output, and a second copy of each rank's keys.
    assert list(more.values()) == [0, 32 * 3 * 16, 0, 32 * (48 + 16)]


def layer_on_a_rank(shape, way):
    """Bytes that a rank sends in a step of a layer; and what the layer keeps until backward."""
    ranks = dist.get_world_size()
    layer, cut = Layer(shape), md.context_parallel.Cut.of("zigzag", shape.length, ranks)
    layer.flash = partial(md.context_parallel.ATTENTION[way], cut=cut)
    x = torch.randn(1, shape.length // ranks, shape.width, requires_grad=True)
    with md.measure.TrafficCounter() as traffic:
        kept, out = saved_by_autograd(layer, x)
        out.sum().backward()
    return traffic.sent_bytes + sent(traffic.calls, ranks), kept


def test_what_a_layer_sends_and_keeps(pools):
    """To the byte. Our gathered attention has masks, and joins its output of two runs."""
    for kv_heads, ranks in (2, 2), (2, 4), (12, 4):
        shape, tokens = replace(GROUPED, kv_heads=kv_heads, llama=True), 32 // ranks
        for way in "ring", "gathered", "ulysses":
            name = "gathered once" if way == "gathered" else way
            nbytes, kept = pools(ranks)(layer_on_a_rank, shape, way)[0]
            assert nbytes == pytest.approx(along_context(name, ranks=ranks, shape=shape)), name
            layout = planner.Layout(ranks, context=ranks, context_attention=name)
            small = (2 * (4 + 4 * 48) + 4 * 12) * tokens  # norms and flash attention, as above
            if way == "gathered":
                small += 4 * tokens * 48 + 4 * tokens // 2 * (tokens // 2 + 32)
                small += 8 * 32  # the order of the sequence
            assert kept == layer_activations(shape, layout, "float32") + small, (name, ranks)


def test_what_a_ring_hides():
    """A message takes 512 ns, a block 256 forward and 640 backward, or twice that in a contiguous
    cut but for the first: as long as the longer one, and the last gradients behind no block."""
    for cut, forward, backward in ("zigzag", 3 * 256, 1024 - 640 + 512), ("contiguous", 256, 512):
        found = partial(along_context, "ring", 24e9, context_cut=cut)
        assert found() == pytest.approx(forward + backward)
        assert found(recompute="layers") == pytest.approx(2 * forward + backward)
        pairs = md.context_parallel.cost.work(cut, 512, 4)  # a block is 512² / 32
        room = md.context_parallel.cost.ring_time(pairs, 256 * 32 / 512**2, 512)
        computing = 1024 * (7 / 4 if cut == "contiguous" else 1)
        assert room == pytest.approx(computing + forward, rel=0.01)


def test_a_contiguous_cut():
    """Four ranks compute 1, 3, 5, 7 sixteenths of causal attention: the last, 7/4 of the mean."""
    device, of = planner.Device(1e12, 1e9, md.Link(8)), partial(planner.Layout, 4, context=4)
    flops = (2 + 5) / 2 * 2 * 32 * 48 * 8  # of seven products, half, of 8 tokens with 32
    for way, more in ("gathered", 3 / 4), ("ring", 3 / 4), ("ulysses", 0):
        even, last = (
            planner.step_time(GROUPED, of(context_attention=way, context_cut=cut), device).compute
            for cut in planner.CONTEXT_CUT
        )
        assert (last - even) * 1e12 == pytest.approx(more * flops, abs=1), way


# ---- experts -----------------------------------------------------------------------------------

SPARSE = planner.Transformer(2, 32, 4, 12, 64, hidden=64, experts=8, active=3, tied=True)


def test_states_of_experts():
    """Shared out by 4, each has 16 / 4 copies, which ZeRO shares out further."""
    held = partial(planner.peak, SPARSE, precision="float32", optimizer="adam")
    one = 2 * 8 * 2 * 32 * 64  # both layers' experts: two matrices of 32 x 64
    rest = SPARSE.parameters - one
    for stage in 0, 1, 2:
        found = held(planner.Layout(16, stage=stage, experts=4))
        apart = [(16, 4) if stage >= first else (1, 1) for first in (3, 2, 1)]
        wanted = [4 * (rest / N + one / 4 / copies) for N, copies in apart]
        wanted[2] *= 2
        assert [*found.categories.values()][:3] == pytest.approx(wanted), stage
    four, eight = (held(planner.Layout(16, stage=3, experts=n)) for n in (4, 8))
    assert four.parameters < 4 * 1.4 * (rest + one) / 16
    assert four.copies - eight.copies == (4 + 4) * 2 * one / 2 / 8  # of two layers at once


def along_experts(flops=math.inf, per_node=4, ranks=4, **others):
    """As `along_context`: nanoseconds, and of computing."""
    layout = planner.Layout(ranks, experts=4, **others)
    cable = md.Link(8 * per_node, 0)  # each rank's part carries a byte in a nanosecond
    device = planner.Device(flops, 1e9, md.Link(8, 0, inter=cable), per_node)
    took = planner.step_time(SPARSE, layout, device, "float32")
    return 1e9 * took.experts, took.compute


def test_time_of_experts():
    """By hand: 12 tokens, of which 3 rows of 128 bytes go out, 3/4 of them to other ranks; two
    layers, back, and the same in backward."""
    row = 12 * 128 * 2 * 4
    assert along_experts()[0] == pytest.approx(row * 3 * 3 / 4)
    assert along_experts(imbalance=1.5)[0] == pytest.approx(1.5 * row * 3 * 3 / 4)
    assert along_experts(recompute="layers")[0] == pytest.approx(6 / 4 * row * 3 * 3 / 4)
    assert along_experts(ranks=8, tensor=2)[0] == pytest.approx(row / 2 * 3 * 3 / 4)
    assert along_experts(ranks=8, pipeline=2)[0] == pytest.approx(row / 2 * 3 * 3 / 4)
    distinct = 4 * (1 - math.comb(6, 3) / math.comb(8, 3))
    assert along_experts(once=True)[0] == pytest.approx(row * distinct * 3 / 4)
    nodes = 2 * (1 - math.comb(4, 3) / math.comb(8, 3))
    assert along_experts(once=True, per_node=2)[0] == pytest.approx(row * nodes / 2)
    for again, passes in ("nothing", 3), ("layers", 4):  # forward, and twice as much back
        even, uneven = (along_experts(1e12, imbalance=n, recompute=again)[1] for n in (1, 2))
        more = passes * 2 * 12 * 3 * 2 * 2 * 32 * 64  # of 3 experts
        assert (uneven - even) * 1e12 == pytest.approx(more)
    sent = planner.messages(SPARSE, planner.Layout(4, experts=4, imbalance=1.5), "float32")
    assert ("all_to_all", 1.5 * 12 * 3 * 128, 4, 8, "experts") in sent


def test_what_else_experts_change():
    """By hand: copies of experts are averaged among themselves, the rest among all; a tensor rank
    has no part of an expert, so that only attention sends along tensor; pipeline is outermost."""
    device = planner.Device(1e12, 1e9, md.Link(8, 0), bandwidth=1e9)
    took = planner.step_time(SPARSE, planner.Layout(8, experts=4), device, "float32")
    routed = 2 * 8 * 2 * 32 * 64
    rest = SPARSE.parameters - routed
    assert 1e9 * took.data == pytest.approx(4 * rest * 2 * 7 / 8 + 4 * routed / 4)
    assert 1e9 * took.optimizer == pytest.approx(28 * (rest + routed / 4))
    cut = planner.step_time(SPARSE, planner.Layout(8, 2, experts=4), device, "float32")
    assert 1e9 * cut.tensor == pytest.approx(2 * 2 * 4 * 12 * 32)
    shared = planner.step_time(replace(SPARSE, shared=1), planner.Layout(2, 2), device, "float32")
    assert shared.tensor == pytest.approx(2 * cut.tensor)
    apart = replace(device, link=md.Link(8, 0, inter=md.Link(8e3, 0)), per_node=4)
    layout = planner.Layout(8, pipeline=2)  # to the other node, by its faster cable
    near, far = (
        planner.step_time(SPARSE, replace(layout, experts=n), apart, "float32") for n in (1, 4)
    )
    assert far.pipeline == pytest.approx(near.pipeline * 4 / 1000)
    assert far.data > 10 * near.data
    first, *others = stages(planner.MODELS["deepseek-v3"], planner.Layout(16, pipeline=16))
    assert first.layers - first.sparse == 3 and all(s.layers == s.sparse for s in others)


def test_nodes_of_a_token():
    """Beside a router's choices among random scores. DeepSeek-V3 sends to at most 4 of 8 nodes."""
    torch.manual_seed(0)
    for experts, k, nodes, limit in (256, 8, 8, None), (256, 8, 8, 4), (64, 6, 4, None):
        router = md.experts.Router(8, experts, k, nodes=nodes, of_nodes=limit)
        chosen = router.choose(torch.rand(4096, experts)) // (experts // nodes)
        met = F.one_hot(chosen, nodes).amax(1).sum(1).double().mean()
        assert planner.touched(experts, k, nodes, limit) == pytest.approx(met.item(), rel=0.02)
    assert planner.touched(256, 8, 8) == pytest.approx(5.29, abs=0.01)


def calls_of_experts(replicas):
    """Of a step: calls and bytes by operation and number of ranks; and this rank's parameters."""
    torch.manual_seed(dist.get_rank())
    model = md.zoo.Transformer(64, 12, 32, 4, 2)
    for block in model.blocks:
        block.mlp = md.experts.MoE(32, 64, experts=8, k=3)
    shape = replicas, dist.get_world_size() // replicas
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "experts"))
    model = md.DistributedDataParallel(md.experts.parallelize(model, mesh))
    tokens = torch.randint(64, (5, 12))
    with md.measure.TrafficCounter() as traffic:
        model(tokens).sum().backward()
    routed = sum(p.to_local().numel() for p in md.experts.parameters(model))
    return traffic.by_group, routed, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_goes_to_experts(pools, replicas):
    """To the byte, and all parameters. Each rank's rows differ: all together are as planned."""
    ranks, layout = 4, planner.Layout(4, micro_batch=5, experts=4 // replicas)
    biases = 2 * 3 * 32  # of qkv, which the zoo has not
    planned, found = Counter(), Counter()
    for each in planner.messages(SPARSE, layout, "float32"):
        planned[each.operation, each.ranks] += ranks * each.times * each.nbytes
    planned["all_reduce", 4] -= ranks * 4 * biases
    for groups, routed, whole in pools(ranks)(calls_of_experts, replicas):
        assert whole == SPARSE.parameters - biases
        assert routed == stages(SPARSE, layout)[0].routed(SPARSE, layout)
        for group, calls in groups.items():
            for operation, (_, nbytes) in calls.items():
                if len(group) > 1 and operation != "broadcast":  # of the routers' biases, by DDP
                    found[operation, len(group)] += nbytes
    assert found == planned


def test_what_experts_keep():
    """The rows that arrive and those that go back, and hidden numbers. Eager torch keeps two more
    rows of each, for index_copy and index_add."""
    for k in 1, 2, 3:
        shape = replace(SPARSE, active=k)
        layer = md.experts.MoE(32, 64, experts=8, k=k)
        x = torch.randn(36, 32, requires_grad=True)
        layout = planner.Layout(micro_batch=3)
        planned = layer_activations(shape, layout, "float32") - 4 * 36 * (4 + 4 - 1) * 32
        kept = saved_by_autograd(layer, x)[0] - planned - 4 * 36 * 2 * k * 32
        assert 0 < kept < 36 * (64 + 8 * 8 + 48 * k), k  # weights, scores and places of rows
    one, uneven = planner.Layout(4, experts=4), planner.Layout(4, experts=4, imbalance=2)
    held, fullest = (layer_activations(SPARSE, each, "float32") for each in (one, uneven))
    assert fullest - held == 4 * 12 * 3 * (2 * 64 + 2 * 32)
    assert layer_activations(replace(SPARSE, shared=1), one, "float32") - held == 4 * 12 * 2 * 64


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


def test_the_command_with_a_size_alone(monkeypatch, capsys):
    said = plan(monkeypatch, capsys, *"--params 7.5e9 --world-size 64 --memory 32".split()).out
    head = "7,500,000,000 parameters, world size 64: GB on each rank, of 29.4 that can be used\n"
    assert said.startswith(head)
    assert row(said, "DDP") == "15 15 90 0 120 no 1.84 billion none".split()
    none = "15 15 1.41 0 31.4 no 7.03 billion none".split()  # 30 whole: none is enough
    assert row(said, "ZeRO-1") == none
    assert row(said, "ZeRO-3")[4:] == "1.88 yes 118 billion 5".split()
    said = plan(monkeypatch, capsys, *"--params 7.5e9 --memory 1e-9".split()).out
    assert row(said, "ZeRO-3")[5:] == ["no", "none", "130,434,782,609"]


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


def test_the_command_with_experts(monkeypatch, capsys):
    asked = "--model mixtral-8x7b --world-size 64 --experts 8 --imbalance 1.5 --once --stage 1"
    said = plan(monkeypatch, capsys, *f"{asked} --micro-batches 4".split()).out
    assert said.startswith("mixtral-8x7b: 46.7 billion parameters, 12.88 billion active, on 64")
    assert "tensor 1; experts shared by 8\n" in said
    (flags,) = [each for each in said.splitlines() if each.startswith("    --")]
    assert "experts" not in flags and "imbalance" not in flags  # a rank that has all has the mean
    few = "--model mixtral-8x22b --world-size 8 --experts 8 --imbalance 1.5 --once"
    said = plan(monkeypatch, capsys, *few.split()).out  # nothing fits: on more ranks
    (flags,) = [each for each in said.splitlines() if each.startswith("    --")]
    assert "--experts 8 --imbalance 1.5 --once" in flags and "has 1.5 times the mean" in said


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
    assert "Nothing fits on 8 ranks with the same 8 sequences a step.\n" in said
    assert "of the fastest that fits on 128 ranks, with 16 sequences a step:\n" in said
    never = plan(monkeypatch, capsys, *"--model gpt-2 --memory 0.001".split()).out
    assert "No layout fits, on any number of ranks" in never


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
    (lambda: planner.memory(math.nan), "more than 0 parameters, not nan"),
    (lambda: planner.memory(1, optimizer="lion"), "one of sgd, .* not 'lion'"),
    (lambda: planner.memory(1, precision="fp16"), "one of mixed, .* not 'fp16'"),
    (lambda: planner.memory(1, activations=-1), "activations of -1 bytes makes no"),
    (lambda: planner.largest_model(-1), "a memory of -1 bytes"),
    (lambda: planner.traffic(1, 2, 5), "stage must be one of"),
    (lambda: planner.Device(0, 1, md.Link(1)), "more than 0 FLOP/s"),
    (lambda: replace(DEVICE, utilisation=2), "above 0 and 1 at most, not 2"),
    (lambda: planner.Transformer(2, 10, 3), "cannot be shared by 3 heads"),
    (lambda: planner.Transformer(2, 12, 4, kv_heads=3), "4 heads cannot share 3"),
    (lambda: planner.Transformer(1, 4, 2, experts=2, active=3), "cannot use 3 of 2 experts"),
    (lambda: planner.Layout(8, experts=3), "8 ranks are no multiple of 3 that share experts"),
    (lambda: planner.Layout(8, experts=4, imbalance=5), "imbalance is from 1 to 4, not 5"),
    (lambda: planner.Layout(8, imbalance=1.5), "imbalance is from 1 to 1, not 1.5"),
    (
        lambda: planner.peak(SPARSE, planner.Layout(5, experts=5)),
        "5 ranks cannot share 8 experts",
    ),
    (lambda: planner.messages(SPARSE, planner.Layout(2, 2)), "tensor must be one of 1, not 2"),
    (lambda: planner.messages(SPARSE, planner.Layout(2, once=True)), "once must be one of False"),
    (lambda: planner.Transformer(0, 10, 2), "layers must be a whole number"),
    (lambda: planner.Layout(recompute="all"), "recompute must be one of"),
    (lambda: planner.Layout(8, 3), "8 ranks are no multiple of tensor 3 × pipeline 1"),
    (lambda: planner.peak(TINY, planner.Layout(3, 3)), "4 heads.* cut by tensor 3"),
    (lambda: planner.peak(TINY, planner.Layout(2, 1, 2)), "1 layers are too few"),
    (lambda: along_context("ulysses", ranks=8), "8 ranks cannot share 12 heads, 2 of them of keys"),
    (lambda: along_context("p2p"), "context_attention must be one of gathered, "),
    (lambda: planner.Layout(context_cut="head"), "context_cut must be one of zigzag, contiguous"),
]
AT_THE_COMMAND_LINE = {
    "": "which model",
    "--layers 3": "needs --layers, --width and --heads",
    "--params 1e9 --world-size 0": "from 1 on, not 0",
    "--params 1e9 --memory 0": "more than 0 FLOP/s, memory",
    "--params 1e9 --model gpt-2": "only the size is known",
    "--model gpt-5": "there is no model gpt-5, but gpt-2, ",
    "--model deepseek-v3 --recompute operations": "is planned of dense layers",
    "--model gpt-2 --world-size 2 --experts 2": "2 ranks cannot share 0 experts",
    "--model deepseek-v3 --layers 3": "all 3 layers are dense: none has experts",
    "--model gpt-2 --world-size 6 --tensor 4": "no multiple of tensor 4",
    "--model gpt-2 --world-size 8 --tensor 8": "12 heads",
    "--model gpt-2 --gbps 1 2 3": "one number or two",
    "--model gpt-2 --recompute attention": "flash attention stores no scores",
    "--model gpt-2 --world-size 2 --stage 1 --replicate 2": "are of --stage 3",
    "--model gpt-2 --world-size 3 --context 3": "1024 tokens cannot be shared by 3",
    "--model gpt-2 --world-size 2 --replicate 3": "2 ranks cannot hold 3 copies",
    "--model gpt-2 --world-size 8 --context 8 --context-attention ulysses": "8 ranks cannot share",
}


def test_mistakes(monkeypatch, capsys):
    for fault, words in MISTAKES:
        with pytest.raises(ValueError, match=words):
            fault()
    for arguments, words in AT_THE_COMMAND_LINE.items():
        assert words in plan(monkeypatch, capsys, *arguments.split()).err, arguments


def test_layouts_are_those_that_fit_and_their_times():
    model, gpu = planner.MODELS["llama-3-8b"], planner.GPUS["h100"]
    times = planner.layouts(model, 8, 16, gpu, contexts=[1, 2], precision="megatron")
    assert {each.context for each in times} == {1, 2} and {each.chunks for each in times} == {
        1,
        4,
        8,
    }
    for each, seconds in times.items():
        assert each.sequences == 16 and fits(model, each, gpu, precision="megatron")
        assert seconds == planner.step_time(model, each, gpu, precision="megatron").total
    assert planner.layouts(planner.MODELS["llama-3-405b"], 8, 16, gpu, precision="megatron") == {}
