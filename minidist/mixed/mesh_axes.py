"""The mesh of ranks, and what travels along each of its axes."""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from minidist.common import agree
from minidist.common.groups import require_group
from minidist.instruments.measure import TrafficCounter
from minidist.rank import device

AXES = "data", "pipeline", "tensor"


def mesh(
    data: int = 1, pipeline: int = 1, tensor: int = 1, order: Sequence[str] = AXES
) -> DeviceMesh:
    """All ranks as a mesh with these three axes, by torch's `init_device_mesh`.
    Lesson: mixed_parallelism.

        mesh = md.mixed.mesh(data=2, pipeline=2, tensor=2)     # on 8 ranks

    order: from the outermost axis to the innermost, along which ranks are neighbours: with the one
        above, ranks 0 and 1 share the layers of one stage, and a node of four holds one replica.

    Every rank calls this. Raises ValueError, on every rank, if the sizes do not fit or differ.
    """
    group = require_group(None, "mixed.mesh")
    sizes = dict(data=data, pipeline=pipeline, tensor=tensor)
    agree.require_same(group, sizes | dict(order=tuple(order)))
    if sorted(order) != sorted(AXES):
        raise ValueError(f"order names {', '.join(AXES)}, each once, not {', '.join(order)}")
    if data * pipeline * tensor != group.size():
        text = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        ranks = f"{data * pipeline * tensor} ranks, and there are {group.size()}"
        raise ValueError(f"a mesh of {text} is for {ranks}")
    return init_device_mesh(
        device().type, tuple(sizes[axis] for axis in order), mesh_dim_names=tuple(order)
    )


def traffic_by_axis(
    traffic: TrafficCounter, mesh: DeviceMesh
) -> dict[str, dict[str, tuple[int, int]]]:
    """What this rank has sent along each axis, and its collectives: {operation: (calls, bytes)},
    as `TrafficCounter` counts them. Lesson: mixed_parallelism."""
    ranks = {a: dist.get_process_group_ranks(mesh.get_group(a)) for a in mesh.mesh_dim_names or ()}
    return {axis: traffic.by_group.get(tuple(those), {}) for axis, those in ranks.items()}
