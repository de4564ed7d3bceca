"""The planner, against the ZeRO paper's table cell by cell, other papers' numbers, and bytes that
are counted on ranks."""

import math
import sys
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import minidist as md
from minidist import planner
from minidist.__main__ import main
from minidist.planner.speed import COLLECTIVES, Machine, fit

# ZeRO (arXiv 1910.02054), Table 1: GB a device with P_os, P_os+g, P_os+g+p. The first column is
# rounded, the others are cut off.
TABLE_1 = {
    1: [(120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)],
    4: [(52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)],
    16: [(35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)],
    64: [(31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)],
    256: [(30.4, 15.4, 0.47), (518, 263, 8), (4046, 2054, 62.5)],
    1024: [(30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)],
}
SIZES = [7.5e9, 128e9, 1e12]
CELLS = [
    (world_size, SIZES[column], stage, printed)
    for world_size, row in TABLE_1.items()
    for column, cells in enumerate(row)
    for stage, printed in enumerate(cells, start=1)
]


@pytest.mark.parametrize(("world_size", "parameters", "stage", "printed"), CELLS)
def test_table_1_of_the_zero_paper(world_size, parameters, stage, printed):
    P, N = parameters, world_size
    formula = {1: 4 * P + 12 * P / N, 2: 2 * P + 14 * P / N, 3: 16 * P / N}[stage]
    found = md.planner.memory(parameters, world_size, stage).total
    assert found == pytest.approx(formula, rel=1e-12)
    assert abs(found / 1e9 - printed) < (0.055 if parameters == 7.5e9 else 1)


def test_figure_1_of_the_zero_paper():
    found = [md.planner.memory(7.5e9, 64, stage) for stage in range(4)]
    assert [round(each.total / 1e9, 1) for each in found] == [120, 31.4, 16.6, 1.9]
    assert [round(each.parameters / 1e9, 2) for each in found] == [15, 15, 15, 0.23]
    assert [round(each.gradients / 1e9, 2) for each in found] == [15, 15, 0.23, 0.23]
    assert [round(each.optimizer_states / 1e9, 2) for each in found] == [90, 1.41, 1.41, 1.41]


@pytest.mark.parametrize(
    ("optimizer", "precision", "each"),
    [
        ("adam", "mixed", (2, 2, 12)),
        ("adamw", "float32", (4, 4, 8)),
        ("momentum", "float32", (4, 4, 4)),
        ("sgd", "float32", (4, 4, 0)),
        ("sgd", "mixed", (2, 2, 4)),
        ("adam", "bfloat16", (2, 2, 4)),
        ("rmsprop", "float64", (8, 8, 8)),
    ],
)
def test_bytes_a_parameter(optimizer, precision, each):
    found = md.planner.memory(1, optimizer=optimizer, precision=precision, activations=5)
    names = ["parameters", "gradients", "optimizer states", "activations"]
    assert list(found.categories.items()) == list(zip(names, [*each, 5], strict=True))
    assert found.total == sum(each) + 5


# ---- counted on ranks -------------------------------------------------------------------------

SHAPE = 64, 32, 16  # Ψ = 2608, which 1, 2 and 4 ranks share without padding
OPTIMIZERS = {
    "adam": partial(torch.optim.Adam, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd": partial(torch.optim.SGD, lr=0.1),
}


def counted(stage, optimizer, dtype):
    """On a rank, after two steps: the bytes that it holds, and how many numbers are counts."""
    model = md.zoo.mlp(*SHAPE, dtype=dtype)
    make = OPTIMIZERS[optimizer]
    if stage == 0:
        model = md.DistributedDataParallel(model)
        own = make(model.parameters())
    else:
        own = md.ZeroRedundancyOptimizer(model.parameters(), make.func, **make.keywords)
        wrap = partial(md.ShardedDataParallel, optimizer=own)
        model = (md.DistributedDataParallel if stage == 1 else wrap)(model)
    with md.measure.MemoryTracker(model, own) as memory:
        for _ in range(2):
            own.zero_grad()
            model(torch.ones(3, 64, dtype=dtype)).sum().backward()
            own.step()
    states = [value for each in own.state.values() for value in each.values()]
    counts = sum(each.nbytes for each in states if torch.is_tensor(each) and not each.ndim)
    return memory.after("step"), counts


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bytes_that_ranks_hold(pools, world_size, stage, optimizer):
    for dtype in torch.float32, torch.float64:
        precision = str(dtype).removeprefix("torch.")
        planned = md.planner.memory(
            2608, world_size, stage, optimizer=optimizer, precision=precision
        ).categories
        for live, counts in pools(world_size)(counted, stage, optimizer, dtype):
            live["optimizer states"] -= counts
            assert {name: live[name] for name in planned} == planned


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


@given(st.floats(1e3, 1e12), st.floats(1, 1e13), st.integers(0, 3), st.floats(0, 1e9))
def test_what_is_said_to_fit_fits_just(parameters, nbytes, stage, activations):
    def total(world_size):
        return planner.memory(parameters, world_size, stage, activations=activations).total

    try:
        fewest = planner.smallest_world_size(nbytes, parameters, stage, activations=activations)
    except ValueError:
        assert total(10**9) > nbytes * (1 - 1e-6)
    else:
        assert total(fewest) <= nbytes * (1 + 1e-6)
        assert fewest == 1 or total(fewest - 1) > nbytes * (1 - 1e-6)


# ---- transformers -----------------------------------------------------------------------------

GPT_3 = planner.Transformer(layers=96, width=12288, heads=96)
MT_NLG = planner.Transformer(layers=105, width=20480, heads=128)


def test_parameters_of_a_transformer():
    assert round(GPT_3.parameters / 1e9) == 175
    assert round(MT_NLG.parameters / 1e9) == 530
    ours = md.zoo.Transformer(vocabulary=256, length=32, width=32, heads=2, layers=3)
    planned = planner.Transformer(3, 32, 2, 32, 256).parameters
    # Ours has no bias in qkv, 3h a layer, and a last norm of 2h, which the formula leaves out.
    assert sum(p.numel() for p in ours.parameters()) == planned - 3 * 3 * 32 + 2 * 32


def test_activations_of_a_transformer():
    """arXiv 2205.05198, Table 2; its section 5: 5as/h is 80 for GPT-3 and 64 for MT-NLG, and to
    compute attention again saves 70% and 65%."""
    for model, scores, saved in (GPT_3, 80, 0.70), (MT_NLG, 64, 0.65):
        sbhl = 2048 * 3 * model.width * model.layers
        of = partial(model.activations, 3)
        assert of() == pytest.approx(sbhl * (34 + scores))
        assert of(tensor_parallel=8) == pytest.approx(sbhl * (10 + 24 / 8 + scores / 8))
        both = partial(of, tensor_parallel=8, sequence_parallel=True)
        assert both() == pytest.approx(sbhl * (34 / 8 + scores / 8))
        assert both(recompute="attention") == pytest.approx(sbhl * 34 / 8)
        assert of(recompute="layers") == 2 * sbhl
        assert 1 - of(recompute="attention") / of() == pytest.approx(saved, abs=0.006)


# ---- time -------------------------------------------------------------------------------------

MACHINE = planner.Machine(flops=1e12, alpha=1e-5, beta=1e-9)


def test_traffic():
    """ZeRO, section 7: 2Ψ, 2Ψ, 3Ψ; here with (N-1)/N, and stage 1 after an all_reduce."""
    assert [md.planner.traffic(100, 4, stage, precision="float32") for stage in range(4)] == [
        pytest.approx(4 * 100 * times * 3 / 4) for times in (2, 3, 2, 3)
    ]
    assert md.planner.traffic(100, 1, 3) == 0
    assert md.planner.traffic(100, 4) == 300  # mixed: gradients of 2 bytes


@pytest.mark.parametrize(("stage", "messages", "elements"), [(0, 6, 2), (1, 9, 3), (3, 9, 3)])
def test_step_time(stage, messages, elements):
    took = md.planner.step_time(1e6, 4, stage, tokens=500, machine=MACHINE)
    assert took.compute == pytest.approx(6 * 1e6 * 500 / 1e12)
    assert took.communication == pytest.approx(
        messages * 1e-5 + elements * 3 / 4 * 2e6 * 1e-9, rel=1e-12
    )
    assert took.total == took.compute + took.communication
    assert took.overlapped == max(took.compute, took.communication)
    again = md.planner.step_time(1e6, 4, stage, tokens=500, machine=MACHINE, recompute=True)
    assert again.compute == pytest.approx(took.compute * 8 / 6)


@pytest.mark.parametrize("world_size", [2, 5])
def test_alpha_and_beta_are_found_again(world_size):
    alpha, beta = 3e-5, 2e-10
    cost = partial(md.collectives.cost, "all_reduce", "ring", world_size)
    times = {n: cost(n).seconds(alpha, beta) for n in (4, 2**22)}
    assert fit(world_size, times) == pytest.approx((alpha, beta))
    assert fit(world_size, {4: 1e-3, 2**22: 0.9e-3})[1] == 0  # noise: not less than nothing


@pytest.mark.parametrize("world_size", [1, 2])
def test_calibrate(pools, world_size):
    machine = md.planner.calibrate(pools(world_size))
    assert machine.flops > 0
    assert (machine.alpha > 0) == (world_size == 2)
    assert md.planner.step_time(1e6, world_size, 2, tokens=8, machine=machine).total > 0


def on_a_link(start, stage, parameters):
    """Seconds of the collectives of a step, one after another."""
    size, x = dist.get_world_size(), torch.zeros(parameters)
    blocks = list(x.chunk(size))
    calls = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: dist.all_gather(blocks, blocks[0].clone()),
        "reduce_scatter": lambda: dist.reduce_scatter(blocks[0].clone(), blocks),
    }
    time.sleep(max(0.0, start - time.monotonic()))
    for operations in COLLECTIVES[stage]:
        for operation in operations:
            calls[operation]()
    return time.monotonic() - start


@pytest.mark.alone
@pytest.mark.parametrize("nodes", [1, 3])
def test_on_a_link_a_step_takes_what_is_planned(nodes):
    link, parameters = md.Link(gbps=0.04, latency_us=5000), 120_000
    machine = Machine.on(link, flops=1e9)
    with md.ranks(3, "shm", nodes, link=link) as ranks:
        for stage in range(4):
            planned = md.planner.step_time(
                parameters, 3, stage, tokens=1, machine=machine, precision="float32"
            ).communication
            for _ in range(6):  # another process may have been in the way
                start = time.monotonic() + 0.05
                measured = max(ranks(on_a_link, start, stage, parameters))
                assert measured > 0.999 * planned
                if measured < 1.05 * planned:
                    break
            else:
                raise AssertionError(f"stage {stage}: {measured:.4f} s, planned {planned:.4f} s")


def test_a_machine_on_a_link_with_nodes_has_its_cable():
    link = md.Link(100, 5, inter=md.Link(8, 20))
    machine = Machine.on(link, 1e12)
    assert (machine.alpha, machine.beta) == pytest.approx((20e-6, 1e-9))


# ---- python -m minidist plan ------------------------------------------------------------------


def plan(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["minidist", "plan", *arguments])
    try:
        main()
    except SystemExit as ended:
        assert ended.code == 2
    return capsys.readouterr()


def row(text, name, nth=0):
    return [line.split()[1:] for line in text.splitlines() if line.split()[:1] == [name]][nth]


def test_the_command(monkeypatch, capsys):
    said = plan(monkeypatch, capsys, *"--params 7.5e9 --world-size 64 --memory 32".split()).out
    assert said.startswith("7,500,000,000 parameters, world size 64: GB on each rank\n")
    assert row(said, "DDP") == ["15", "15", "90", "0", "120"]
    assert row(said, "ZeRO-1") == ["15", "15", "1.41", "0", "31.4"]
    assert row(said, "16") == ["120", "35.6", "21.6", "7.5"]
    assert "\nIn 32 GB fits ZeRO-1, ZeRO-2, ZeRO-3\n" in said
    assert row(said, "DDP", 1) == ["2", "billion", "no", "number"]
    assert row(said, "ZeRO-3", 1) == ["128", "billion", "4"]
    said = plan(monkeypatch, capsys, *"--params 7.5e9 --memory 1e-9".split()).out
    assert "fits nothing" in said and row(said, "ZeRO-3", 1) == ["none", "120,000,000,000"]


def test_the_command_plans_a_transformer_and_its_time(monkeypatch, capsys):
    shape = "--layers 2 --width 64 --heads 4 --length 16 --batch 3 --recompute layers"
    said = plan(monkeypatch, capsys, *shape.split(), "--tokens", "48").out
    model = planner.Transformer(2, 64, 4, 16)
    assert said.startswith(f"{model.parameters:,} parameters")
    assert float(row(said, "DDP")[3]) == pytest.approx(2 * 2 * 16 * 3 * 64 / 1e9, rel=0.01)
    assert "with 48 tokens a rank (ranks like these: " in said
    assert row(said, "ZeRO-3", 2)[1] == "0"  # one rank sends nothing


MISTAKES = {
    "world size 0": (lambda: planner.memory(1e9, 0), "from 1 on, not 0"),
    "half a rank": (lambda: planner.memory(1e9, 1.5), "from 1 on, not 1.5"),
    "stage 4": (lambda: planner.memory(1e9, 2, 4), "stage must be one of 0, 1, 2, 3, not 4"),
    "negative": (lambda: planner.memory(-1, 2), "more than 0 parameters, not -1"),
    "no number": (lambda: planner.memory(math.nan), "more than 0 parameters, not nan"),
    "endless": (lambda: planner.step_time(math.inf, tokens=1, machine=MACHINE), "not inf"),
    "optimizer": (lambda: planner.memory(1, optimizer="lion"), "one of sgd, .* not 'lion'"),
    "precision": (lambda: planner.memory(1, precision="fp16"), "one of mixed, .* not 'fp16'"),
    "activations": (lambda: planner.memory(1, activations=-1), "activations of -1 bytes makes no"),
    "memory": (lambda: planner.largest_model(-1), "a memory of -1 bytes"),
    "no memory": (lambda: planner.smallest_world_size(math.nan, 1), "a memory of nan bytes"),
    "traffic": (lambda: planner.traffic(1, 2, 5), "stage must be one of"),
    "traffic of nothing": (lambda: planner.traffic(1, 2, precision="fp8"), "precision must be one"),
    "tokens": (lambda: planner.step_time(1, tokens=0, machine=MACHINE), "more than 0 tokens"),
    "machine": (lambda: planner.Machine(0, 0, 0), "more than 0 FLOP/s"),
    "heads": (lambda: planner.Transformer(2, 10, 3), "cannot be shared by 3 heads"),
    "layers": (lambda: planner.Transformer(0, 10, 2), "layers must be a whole number"),
    "batch": (lambda: GPT_3.activations(0), "batch and tensor_parallel are 1 or more"),
    "recompute": (lambda: GPT_3.activations(1, recompute="all"), "recompute must be one of"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    fault, words = MISTAKES[name]
    with pytest.raises(ValueError, match=words):
        fault()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "how large is the model"),
        ("--layers 3", "needs --layers, --width and --heads"),
        ("--params 1e9 --world-size 0", "from 1 on, not 0"),
        ("--params -3", "more than 0 parameters"),
        ("--params 1e9 --memory 0", "nothing fits in 0 GB"),
    ],
)
def test_mistakes_at_the_command_line(monkeypatch, capsys, arguments, words):
    assert words in plan(monkeypatch, capsys, *arguments.split()).err
