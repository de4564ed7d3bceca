"""The lab's mesh: its groups beside torch's, its messages beside those of a real step."""

import json
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minidist as md
from minidist.context_parallel.attention_cost import sent
from minidist.instruments import planner, scaling
from minidist.instruments.scaling.llama_shape import plan_of
from web.lab import answers
from web.lab.answers import mesh

pytestmark = pytest.mark.timeout(120)

SMALL = planner.Transformer(4, 64, 8, 16, 96, 2, 96, llama=True, tied=False)
ASKED = {
    **{"model": "llama-3-8b", "gpus": 64, "pipeline": 2, "context": 2, "tensor": 4, "gpu": 13},
    **{"outermost": "data", "stage": 1, "micro_batches": 8, "attention": "ring"},
    **{"sequence_parallel": False},
}
RING = {"context": 2, "context_attention": "ring"}
LAYOUTS = {
    "data × context × tensor": (planner.Layout(8, 2, **RING), "data"),
    "pipeline × context × tensor": (
        planner.Layout(8, 2, 2, **RING, micro_batches=2, sequence_parallel=True),
        "context",
    ),
    "pipeline × context": (planner.Layout(8, 1, 4, **RING, micro_batches=2), "pipeline"),
}


class WithoutPositions(nn.Module):
    def forward(self, tokens_and_positions):
        return tokens_and_positions[0]


class OfTokens(scaling.Llama):
    """Which has no positions: ranks along context are given both."""

    def sequential(self):
        return nn.Sequential(WithoutPositions(), *super().sequential())


def step_of(layout, sizes):
    """On a rank: its groups by torch's mesh, and what it sends in a step."""
    whole = md.mixed.mesh(**sizes, order=tuple(sizes))
    torch.manual_seed(0)
    model = OfTokens(SMALL).to_empty(device="cpu")
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    model = md.mixed.MixedParallel(
        model,
        whole,
        layout.micro_batches,
        balance=[
            each.layers + 2 * each.first + 2 * each.last
            for each in planner.layout.stages(SMALL, layout)
        ],
        plan=plan_of(SMALL),
        sequence_parallel=layout.sequence_parallel,
    )
    rows = torch.randint(SMALL.vocabulary, (layout.micro_batches, SMALL.length))
    model.train_step(rows, rows, model.cross_entropy)  # here the stages learn the shapes
    with md.measure.TrafficCounter() as traffic:
        model.train_step(rows, rows, model.cross_entropy)
    groups = {axis: dist.get_process_group_ranks(whole.get_group(axis)) for axis in sizes}
    groups["data"] = dist.get_process_group_ranks(md.mixed.mesh_axes.replicas(whole).get_group())
    return groups, traffic.by_group, traffic.sent_to


@pytest.mark.parametrize("name", LAYOUTS)
def test_groups_are_torchs_and_messages_those_of_a_real_step(pools, name):
    """Along no axis, on no rank, is there another group or another message."""
    layout, outermost = LAYOUTS[name]
    sizes = mesh.sizes_of(layout, outermost)
    calls = mesh.planned(SMALL, layout, "float32")
    to = mesh.sent_along(sizes, calls)
    for rank, (groups, by_group, sent_to) in enumerate(pools(8)(step_of, layout, sizes)):
        for axis in groups:
            assert mesh.groups(sizes, mesh.GROUPS[axis])[rank] == groups[axis], (rank, axis)
        planned = Counter()
        for each in calls[mesh.places(sizes)[rank]["pipeline"]]:
            assert each.ranks == len(groups[each.axis])
            planned[tuple(groups[each.axis]), each.operation] += each.nbytes * each.times
        real = Counter()
        for group, operations in by_group.items():
            for operation, (_, nbytes) in operations.items():
                real[group, {"isend": "send"}.get(operation, operation)] += nbytes
        for each in planned | real:
            if each[1] not in ("receive", "broadcast") and len(each[0]) > 1:
                # Real ranks also agree: flags, rows, the loss. That is little.
                assert 0 <= real[each] - planned[each] < 1000, (rank, each)
        direct = Counter(to["pipeline"][rank]) + Counter(to["context"][rank])
        found = Counter({other: nbytes for other, nbytes in enumerate(sent_to) if nbytes})
        assert found == direct


@pytest.mark.parametrize("outermost", mesh.AXES)
def test_the_order_of_torchs_mesh(outermost):
    """As init_device_mesh lays out 48 ranks, of which this process is the first."""
    sizes = mesh.sizes_of(planner.Layout(48, 2, 4, context=3), outermost)
    with scaling.one_rank_of(48):
        whole = dist.init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))
    assert sizes["data"] == 2
    for rank, place in enumerate(mesh.places(sizes)):
        assert whole.mesh[tuple(place.values())] == rank
    for axis in mesh.AXES:
        rows = whole.mesh.movedim([*sizes].index(axis), -1).reshape(-1, sizes[axis]).tolist()
        assert {*map(tuple, mesh.groups(sizes, [axis]))} == {*map(tuple, rows)}


def test_keys_and_values_as_their_own_formula_has_them():
    """`attention_cost` counts the numbers that a rank sends in a layer, forward and backward."""
    shape = planner.MODELS["llama-3-8b"]
    b = shape.length * shape.kv_width()
    for planned, way in ("ring", "ring"), ("gathered once", "gathered"):
        layout = planner.Layout(4, context=4, context_attention=planned)
        to = mesh.sent_along(mesh.sizes_of(layout, "data"), mesh.planned(shape, layout))
        numbers = sum(sent(way, 4, b, shape.heads, shape.kv_heads))
        assert to["context"][1] == {2: pytest.approx(2 * 32 * numbers)}  # bytes, layers


def ask(**asked):
    return json.loads(answers.answer("mesh", json.dumps(ASKED | asked)))


def test_an_answer():
    """Of GPU 13 of 64: places 4 × 2 × 2 × 4, the last coordinate runs fastest."""
    found = ask()
    assert found["places"][13] == {"data": 0, "pipeline": 1, "context": 1, "tensor": 1}
    axes = {each["axis"]: each for each in found["axes"]}
    assert axes["tensor"]["group"] == [12, 13, 14, 15] and axes["pipeline"]["group"] == [5, 13]
    assert axes["context"]["group"] == [9, 13]
    assert axes["data"]["group"] == [9, 13, 25, 29, 41, 45, 57, 61]
    nexts = {axis: [(to["gpu"], to["across"]) for to in axes[axis]["to"]] for axis in axes}
    assert nexts["data"] == [(25, True)] and nexts["tensor"] == [(14, False)]
    assert nexts["pipeline"] == [(5, True)] and nexts["context"] == [(9, False)]
    sums = next(each for each in axes["tensor"]["calls"] if each["operation"] == "all_reduce")
    assert axes["tensor"]["to"][0]["bytes"] == pytest.approx(sums["bytes"] * 2 * 3 / 4)
    assert ask(gpus=8, gpu=100, tensor=2)["set"] == {"gpu": 7}


@pytest.mark.parametrize("outermost", mesh.AXES)
def test_what_leaves_a_node_is_what_its_gpus_send_to_others(outermost):
    leaves = [0.0] * 8
    for gpu in range(64):
        found = ask(gpu=gpu, outermost=outermost)
        every = [to for axis in found["axes"] for to in axis["to"]]
        assert all(to["across"] == (to["gpu"] // 8 != gpu // 8) for to in every)
        leaves[gpu // 8] += sum(to["bytes"] for to in every if to["across"])
    assert found["orders"][outermost]["total"] == pytest.approx(max(leaves))


def test_refusals_are_sentences():
    assert "no multiple of tensor 16 × pipeline 8" in ask(tensor=16, pipeline=8)["error"]
    with pytest.raises(ValueError, match="ulysses"):
        planner.messages(SMALL, planner.Layout(2, context=2, context_attention="ulysses"))
