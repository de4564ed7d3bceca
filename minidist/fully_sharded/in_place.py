"""Torch's second form: `fully_shard` makes a unit of a module in place, without a wrapper."""

from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

from minidist.common.groups import groups_of
from minidist.fully_sharded import sharded_states
from minidist.fully_sharded import torch_arguments as given
from minidist.fully_sharded.build_unit import require_alike, shard
from minidist.fully_sharded.units import unit_of

M = TypeVar("M", bound=nn.Module)
NOT_HERE = {
    "shard_placement_fn": "parameters are cut in one flat tensor, not along an axis of each",
    "dp_mesh_dims": "give the axes that shard as the mesh: mesh['replicas', 'shards']",
}


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    **not_here: Any,
) -> M:
    """Make a unit of `module`, in place: torch's `fully_shard`.

        for block in model.blocks:
            md.fully_shard(block)
        md.fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters())     # after, not before

    The parts first, then the whole, which gets the parameters that no part has. It trains as
    `FullyShardedDataParallel` does: the same units, the same messages. `state_dict()` has a DTensor
    of this rank's rows for each parameter, and `load_state_dict` takes it, or whole tensors;
    `md.fully_sharded.optim_state_dict` is for optimizers, and `md.saving` for both.
    `torch.nn.utils.clip_grad_norm_` clips by the norm of the whole gradient. `parameters()` are
    local shards, plain tensors: (n,), of matrices (n, 1). Every rank takes rank 0's values.

    mesh: of one axis; of two for hybrid sharding. None is all ranks.
    reshard_after_forward: False keeps the parameters for the backward pass. None is True here, and
        False for the root in torch.
    mp_policy, offload_policy: torch's. Shards on the CPU, for an optimizer there, too.
    ignored_params: parameters that stay as they are on each rank.

    Returns the module, of a class that is an `FSDPModule` as well. Raises ValueError or TypeError
    for what else torch takes, for a list of modules, and if the ranks have different modules.
    Lesson: fully_sharded
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard takes one module, not {type(module).__name__}")
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise ValueError(f"a {type(module).__name__} has no forward pass: shard what is in it")
    if unit_of(module) is not None:
        raise ValueError(f"this {type(module).__name__} is sharded already")
    for name, value in not_here.items():
        if name not in NOT_HERE:
            raise TypeError(f"fully_shard has no argument {name}")
        if value is not None:
            raise ValueError(f"fully_shard: {name}: {NOT_HERE[name]}")
    if not isinstance(reshard_after_forward, bool | None):
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward}: parameters are freed after the "
            "forward pass, or not. They cannot be resharded to a smaller group of ranks"
        )
    mixed = given.of_type("mp_policy", mp_policy, MixedPrecisionPolicy) or MixedPrecisionPolicy()
    offload = given.of_type("offload_policy", offload_policy, OffloadPolicy)
    options = given.Options(
        groups_of(None, mesh, "fully_shard", most_axes=2),
        mesh,
        MixedPrecision(
            mixed.param_dtype,
            mixed.reduce_dtype,
            cast_forward_inputs=mixed.cast_forward_inputs,
            cast_root_forward_inputs=mixed.cast_forward_inputs,
            _module_classes_to_ignore=(),
        ),
        mixed.output_dtype,
        reshards=reshard_after_forward is not False,
        offloads=isinstance(offload, CPUOffloadPolicy),
        ignored_parameters=given.ignored(ignored_params or ())[1],
    )
    require_alike(module, options, dict)
    unit = shard(module, options, sharded_states.wholes)
    unit.form = partial(sharded_states.rows, unit.mesh)
    return module
