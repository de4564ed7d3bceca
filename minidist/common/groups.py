"""Which ranks take part: torch's arguments `process_group` and `device_mesh`."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

REHEARSAL = "rehearsal"  # the backend of `scaling.one_rank_of`


def require_group(group: dist.ProcessGroup | None, who: str) -> dist.ProcessGroup:
    """The group that was given, or the default one. Raises RuntimeError where there is none, and
    ValueError where this rank is not a member."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            f"{who} works within a process group, and there is none. Start ranks by a %%ranks "
            "cell, md.ranks or md.launch; or call torch.distributed.init_process_group first."
        )
    found: Any = dist.group.WORLD if group is None else group
    if found is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{who}: rank {dist.get_rank()} is not in the process group it was given")
    return found


def is_rehearsal(group: dist.ProcessGroup | None = None) -> bool:
    """Whether this rank is alone, and its tensors stay on "meta": see `scaling.one_rank_of`."""
    return dist.is_initialized() and dist.get_backend(group) == REHEARSAL


def message_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where small messages live: on the CPU if the backend can send from it, else on a GPU."""
    # The backends are such as "cpu:gloo,cuda:nccl".
    if "cpu:" in dist.get_backend_config(group) or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def groups_of(
    process_group: dist.ProcessGroup | None,
    device_mesh: DeviceMesh | None,
    who: str,
    most_axes: int = 1,
) -> tuple[dist.ProcessGroup, ...]:
    """The group along each axis of the mesh, the last axis first; or the one group, without a mesh.
    Raises ValueError if both are given, or the mesh has more than `most_axes`."""
    if device_mesh is None:
        return (require_group(process_group, who),)
    if process_group is not None:
        raise ValueError(f"give {who} a device_mesh or a process_group, not both")
    if device_mesh.ndim > most_axes:
        wanted = "one axis" if most_axes == 1 else f"at most {most_axes} axes"
        found = f"not {device_mesh.ndim}. mesh[name] has one"
        raise ValueError(f"{who}: device_mesh must have {wanted}, {found}")
    require_group(None, who)
    axes = reversed(range(device_mesh.ndim))
    return tuple(require_group(device_mesh.get_group(axis), who) for axis in axes)
