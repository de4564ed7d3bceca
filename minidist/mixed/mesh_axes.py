"""The mesh of ranks, and what travels along each of its axes."""

from collections.abc import Sequence
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from minidist.common import agree
from minidist.common.groups import require_group
from minidist.instruments.measure import TrafficCounter
from minidist.rank import device

AXES = "data", "pipeline", "tensor"
REPLICAS = "data", "context", "experts"  # along these, ranks have the same part, but for experts


def mesh(
    data: int = 1,
    pipeline: int = 1,
    tensor: int = 1,
    order: Sequence[str] = AXES,
    context: int = 1,
    experts: int = 1,
) -> DeviceMesh:
    """All ranks as a mesh with these three axes, by torch's `init_device_mesh`; and with "context"
    and "experts", before "tensor", if there are several ranks along them.
    Lesson: mixed_parallelism.

        mesh = md.mixed.mesh(data=2, pipeline=2, tensor=2)     # on 8 ranks

    order: from the outermost axis to the innermost, along which ranks are neighbours: with the one
        above, ranks 0 and 1 share the layers of one stage, and a node of four holds one replica.

    Every rank calls this. Raises ValueError, on every rank, if the sizes do not fit or differ.
    """
    group = require_group(None, "mixed.mesh")
    sizes = dict(data=data, pipeline=pipeline, context=context, experts=experts, tensor=tensor)
    agree.require_same(group, sizes | dict(order=tuple(order)))
    absent = {axis for axis, size in sizes.items() if size == 1} - {*AXES}
    sizes = {axis: size for axis, size in sizes.items() if axis not in absent}
    order = [axis for axis in order if axis not in absent]
    order = tuple(sizes) if tuple(order) == AXES else order
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
    """Ranks with the same part of the model, but for experts, as one axis."""
    return sharing_rows(mesh)._flatten()


def sharing_rows(mesh: DeviceMesh) -> DeviceMesh:
    """The axes along which ranks have other rows or tokens: data, context and experts."""
    return mesh[tuple(axis for axis in mesh.mesh_dim_names or () if axis in REPLICAS)]


def traffic_by_axis(
    traffic: TrafficCounter, mesh: DeviceMesh
) -> dict[str, dict[str, tuple[int, int]]]:
    """What this rank has sent along each axis, and its collectives: {operation: (calls, bytes)},
    as `TrafficCounter` counts them. "replicas" is along data, context and experts, where two of
    them have several ranks: the gradients. Lesson: mixed_parallelism."""
    names = mesh.mesh_dim_names or ()
    groups = {axis: mesh.get_group(axis) for axis in names}
    several = [axis for axis in REPLICAS if axis in names and groups[axis].size() > 1]
    if len(several) > 1:
        groups["replicas"] = replicas(mesh).get_group()
    ranks = {axis: tuple(dist.get_process_group_ranks(group)) for axis, group in groups.items()}
    return {axis: traffic.by_group.get(those, {}) for axis, those in ranks.items()}
