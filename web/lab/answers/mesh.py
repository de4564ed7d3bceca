"""The room "A mesh": who talks to whom in data × pipeline × context × tensor, and what leaves a
node. Bytes are the planner's: of each message of a step, as a ring carries it."""

from collections import defaultdict
from collections.abc import Iterable
from itertools import product
from typing import Any

from minidist.collectives.cost import cost
from minidist.instruments.planner import (
    CONTEXT_ATTENTION,
    GPUS,
    MODELS,
    STAGES,
    Layout,
    Planned,
    Transformer,
    messages,
)

AXES = "data", "pipeline", "context", "tensor"  # from the outermost to the innermost
NODE = 8  # GPUs
CABLE = GPUS["h100"].link.inter  # of a node
# Ranks along context have other tokens, and the same weights: replicas, whose gradients are summed.
GROUPS = {axis: ("data", "context") if axis == "data" else (axis,) for axis in AXES}

Sizes = dict[str, int]  # of each axis, from the outermost to the innermost
Sent = dict[int, float]  # to which rank, how many bytes


def choices() -> dict[str, Any]:
    """Names of models, whose two ends share no weights; of stages of ZeRO, and of attention along
    context; and each axis with the order in which it is the outermost one."""
    return {
        "models": [name for name, model in MODELS.items() if not (model.experts or model.tied)],
        "stages": {str(stage): name for stage, name in STAGES.items()},
        "attention": list(CONTEXT_ATTENTION[:3]),
        "orders": {axis: ordered(axis) for axis in AXES},
    }


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Along each axis, the `group` of the GPU that is asked for, to whom it sends how much in a
    step (`to`), and its `calls`; the bytes that leave a node, in this order of axes and in others.

    asked: `model`; `gpus`, of which `data` takes what the others leave; `pipeline`, `context` and
    `tensor`; `outermost`, the axis that comes first, while the others stay in the order of AXES;
    `stage` of ZeRO, `micro_batches`, `attention` along context, `sequence_parallel`; and `gpu`, the
    one that is looked at, or the last one if there are not so many.
    """
    layout = Layout(
        world_size=asked["gpus"],
        tensor=asked["tensor"],
        pipeline=asked["pipeline"],
        context=asked["context"],
        context_attention=asked["attention"],
        sequence_parallel=asked["sequence_parallel"],
        stage=asked["stage"],
        micro_batches=asked["micro_batches"],
    )
    calls = planned(MODELS[asked["model"]], layout)
    gpu = min(asked["gpu"], layout.world_size - 1)
    sizes = sizes_of(layout, asked["outermost"])
    every = places(sizes)
    sent = sent_along(sizes, calls)
    stage = every[gpu]["pipeline"]
    axes = [
        {
            "axis": axis,
            "size": sizes[axis],
            "group": groups(sizes, GROUPS[axis])[gpu],
            "to": [
                {"gpu": other, "bytes": nbytes, "across": other // NODE != gpu // NODE}
                for other, nbytes in sent[axis][gpu].items()
            ],
            "calls": together(each for each in calls[stage] if each.axis == axis),
        }
        for axis in AXES
    ]
    return {
        **({"set": {"gpu": gpu}} if gpu < asked["gpu"] else {}),
        "node": NODE,
        "places": every,
        "axes": axes,
        "orders": {axis: leaving(sizes_of(layout, axis), calls) for axis in AXES},
    }


def ordered(outermost: str) -> list[str]:
    """All axes, this one first."""
    return [outermost, *(axis for axis in AXES if axis != outermost)]


def sizes_of(layout: Layout, outermost: str) -> Sizes:
    return {axis: getattr(layout, axis) for axis in ordered(outermost)}


def places(sizes: Sizes) -> list[dict[str, int]]:
    """The coordinates of each rank. The last axis runs fastest, as in torch's init_device_mesh."""
    every = product(*map(range, sizes.values()))
    return [dict(zip(sizes, place, strict=True)) for place in every]


def groups(sizes: Sizes, along: Iterable[str]) -> list[list[int]]:
    """Of each rank, those whose places differ from its own along these axes only, and itself."""
    kept = [axis for axis in sizes if axis not in along]
    keys = [tuple(place[axis] for axis in kept) for place in places(sizes)]
    members = defaultdict(list)
    for rank, key in enumerate(keys):
        members[key].append(rank)
    return [members[key] for key in keys]


def planned(model: Transformer, layout: Layout, precision: str = "mixed") -> list[list[Planned]]:
    """The messages of a step, of a rank of each pipeline stage."""
    return [messages(model, layout, precision, number) for number in range(layout.pipeline)]


def together(calls: Iterable[Planned]) -> list[dict[str, Any]]:
    """Each operation once: how many times, and the bytes of all its vectors."""
    found: dict[str, dict[str, Any]] = {}
    for operation, nbytes, _, times, _ in calls:
        one = found.setdefault(operation, {"operation": operation, "times": 0, "bytes": 0})
        one["times"] += times
        one["bytes"] += times * nbytes
    return list(found.values())


def sent_along(sizes: Sizes, calls: list[list[Planned]]) -> dict[str, list[Sent]]:
    """Along each axis, what each rank sends to whom in a step. A collective goes round in a ring,
    to the next rank of the group; stages send to the next one and to the one before."""
    every = places(sizes)
    found: dict[str, list[Sent]] = {}
    for axis in AXES:
        nbytes = [
            sum(_bytes_sent(each) for each in of_stage if each.axis == axis) for of_stage in calls
        ]
        found[axis] = []
        for rank, group in enumerate(groups(sizes, GROUPS[axis])):
            own, there = nbytes[every[rank]["pipeline"]], group.index(rank)
            if axis == "pipeline":
                to = group[there + 1 : there + 2] + group[max(0, there - 1) : there]
            else:
                to = [group[(there + 1) % len(group)]]
            found[axis].append({other: own / len(to) for other in to} if own else {})
    return found


def _bytes_sent(each: Planned) -> float:
    if each.operation in ("send", "receive"):
        return each.times * each.nbytes if each.operation == "send" else 0.0
    return each.times * cost(each.operation, "ring", each.ranks, each.nbytes).nbytes


def leaving(sizes: Sizes, calls: list[list[Planned]]) -> dict[str, Any]:
    """What goes from a node to others in a step, by axis: of the node from which most does. And how
    long its cable carries that, in seconds."""
    nodes: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(AXES, 0.0))
    for axis, ranks in sent_along(sizes, calls).items():
        for rank, to in enumerate(ranks):
            nodes[rank // NODE][axis] += sum(
                nbytes for other, nbytes in to.items() if other // NODE != rank // NODE
            )
    fullest = max(nodes.values(), key=lambda node: sum(node.values()))
    total = sum(fullest.values())
    assert CABLE is not None
    return {
        "bytes": fullest,
        "total": total,
        "seconds": CABLE.seconds(total, messages=0),
    }
