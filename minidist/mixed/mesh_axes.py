"""The mesh of ranks, and what travels along each of its axes."""

from collections.abc import Sequence
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from minidist.common import agree
from minidist.common.groups import require_group
from minidist.measure import TrafficCounter
from minidist.rank import device

AXES = "data", "pipeline", "tensor"
WITH_CONTEXT = "data", "pipeline", "context", "tensor"


def mesh(
    data: int = 1,
    pipeline: int = 1,
    tensor: int = 1,
    order: Sequence[str] = WITH_CONTEXT,
    *,
    context: int = 1,
) -> DeviceMesh:
    """All ranks as a mesh with these axes, by torch's `init_device_mesh`; with "context" only if
    there are several ranks along it. Lesson: mixed_parallelism.

        mesh = md.mixed.mesh(data=2, pipeline=2, tensor=2)     # on 8 ranks

    order: from the outermost axis to the innermost, along which ranks are neighbours: with the one
        above, ranks 0 and 1 share the layers of one stage, and a node of four holds one replica.

    Every rank calls this. Raises ValueError, on every rank, if the sizes do not fit or differ.
    """
    group = require_group(None, "mixed.mesh")
    sizes = dict(data=data, pipeline=pipeline, tensor=tensor)
    sizes |= dict(context=context) if context > 1 else {}
    agree.require_same(group, sizes | dict(order=tuple(order)))
    order = [axis for axis in order if axis != "context" or context > 1]
    if sorted(order) != sorted(sizes):
        raise ValueError(f"order names {', '.join(sizes)}, each once, not {', '.join(order)}")
    if prod(sizes.values()) != dist.get_world_size():
        text = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        ranks = f"{prod(sizes.values())} ranks, and there are {dist.get_world_size()}"
        raise ValueError(f"a mesh of {text} is for {ranks}")
    return init_device_mesh(
        device().type, tuple(sizes[axis] for axis in order), mesh_dim_names=tuple(order)
    )


def replicas(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that average gradients, as one axis: those of data, and of context with them."""
    names = mesh.mesh_dim_names or ()
    return mesh[tuple(axis for axis in names if axis in ("data", "context"))]._flatten()


def traffic_by_axis(
    traffic: TrafficCounter, mesh: DeviceMesh
) -> dict[str, dict[str, tuple[int, int]]]:
    """What this rank has sent along each axis, and its collectives: {operation: (calls, bytes)},
    as `TrafficCounter` counts them. Where a mesh has both, what is averaged along data and context
    counts for data. Lesson: mixed_parallelism."""
    axes = [axis for axis in WITH_CONTEXT if axis in (mesh.mesh_dim_names or ())]
    groups = {axis: mesh.get_group(axis) for axis in axes}
    if groups["data"].size() > 1:
        groups["data"] = replicas(mesh).get_group()
    ranks = {axis: tuple(dist.get_process_group_ranks(group)) for axis, group in groups.items()}
    return {axis: traffic.by_group.get(those, {}) for axis, those in ranks.items()}
