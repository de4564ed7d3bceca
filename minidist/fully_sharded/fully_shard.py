"""`fully_shard`, torch's form: it makes a unit of a module, in place. Lesson: fully_sharded"""

from collections.abc import Iterable, Iterator, Set
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from minidist import rank
from minidist.common import agree
from minidist.common.groups import groups_of
from minidist.common.materialize import places_of, state_of
from minidist.common.replicas import broadcast_state, require_same_lines, words
from minidist.fully_sharded.fsdp_module import FSDPModule, group_of, share_state
from minidist.fully_sharded.param_group import Options, ParamGroup

M = TypeVar("M", bound=nn.Module)


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> M:
    """Make a unit of `module`, in place: torch's `fully_shard`.

        for block in model.blocks:
            md.fully_shard(block)
        md.fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters())     # after, not before

    The parts first, then the whole, which gets the parameters that no part has. Each parameter
    becomes a DTensor of this rank's rows. So torch's own tools are right: its clipping,
    `p.norm().full_tensor()`, its optimizers (but Rprop, Adafactor and LBFGS raise: they take no
    DTensors), `get_optimizer_state_dict`, its checkpoints; `md.saving` as well. Every rank takes
    rank 0's values. A model on the device "meta" stays there: call `to_empty(device=...)` and fill
    the parameters after sharding; on the CPU each rank fills its rows by its own random numbers, so
    seed the ranks differently. `load_state_dict` takes DTensors, or whole tensors.

    mesh: of one axis; of two for hybrid sharding, (replicas, shards). None is all ranks.
    reshard_after_forward: False keeps the parameters for the backward pass. None is False for the
        outermost module, the root, with which the backward pass begins, and True for others.
    mp_policy, offload_policy: torch's. Offloaded, shards and so the optimizer are on the CPU, and
        `pin_memory` changes nothing.
    ignored_params: parameters that stay as they are on each rank.

    Returns the module, of a class that is an `FSDPModule` as well. Raises ValueError or TypeError
    for a list of modules, for a parameter without dimensions, for parameters of several dtypes, and
    if the ranks have different modules.

    Limits: an optimizer that was made before trains nothing; `md.watch` finds this. All ranks must
    go through the same units, forward and backward; a unit that only some reach is an error on the
    backend "shm", and may hang, or mix up units of one size, on others. Autograd must come to a
    unit by its output, in lists, dicts and what torch's pytree knows: where a loss is left in an
    attribute, it raises that a parameter was "modified inplace". An output must not be a view of a
    parameter. No backward() within a forward pass, no torch.func, no copy.deepcopy. Of a
    parameter's hooks only `register_post_accumulate_grad_hook` is heard. After a backward pass that
    fails, zero_grad() and a new forward pass. `p.data = ...` changes nothing that is sent: write
    `p.copy_(...)`; load with assign=False.

    Zhao et al. (arXiv 2304.11277). Lesson: fully_sharded
    """
    if not isinstance(module, nn.Module) or isinstance(module, nn.ModuleList | nn.ModuleDict):
        name = type(module).__name__
        raise TypeError(f"fully_shard takes one module, with a forward pass, not a {name}")
    groups = groups_of(None, mesh, "fully_shard", most_axes=2)
    offloads = isinstance(offload_policy, CPUOffloadPolicy)
    options = Options(
        mesh or mesh_of(groups[0], module, offloads),
        groups,
        mp_policy or MixedPrecisionPolicy(),
        reshard_after_forward,
        offloads,
        frozenset(ignored_params or ()),
    )
    with agree.together(*groups):
        lines = list(_describe(module, options.ignored))
    require_same_lines(lines, *groups)
    own = list(own_modules(module))
    given = state_of(own, options.ignored)
    for group in groups[::-1]:
        broadcast_state([tensor for tensor in given if not tensor.is_meta], group)
    named = places_of(own, options.ignored)
    module.__dict__["fsdp_group"] = ParamGroup(module, [m for _, m in own], named, options)
    for _, _, parameter in named:
        parameter.was_sharded = True  # type: ignore
    module.__class__ = _sharded_class(type(module))  # type: ignore
    module.register_load_state_dict_pre_hook(_distribute)
    share_state(module)
    return module


# ---- how a unit is made -----------------------------------------------------------------------


def mesh_of(group: dist.ProcessGroup, module: nn.Module, offloads: bool) -> DeviceMesh:
    """Of one axis, and of the devices that compute."""
    return DeviceMesh.from_group(group, rank.device(None if offloads else module).type)


@cache  # one for all blocks: torch.compile compiles a method once a class
def _sharded_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})


def own_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules of a unit, by name, the outer ones first: those that are in no unit within it.
    One that is there twice comes twice."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and group_of(child) is None:
            yield from own_modules(child, f"{prefix}{name}.")


def _describe(module: nn.Module, ignored: Set[nn.Parameter]) -> Iterator[str]:
    """What must be the same on all ranks. Raises ValueError for what cannot be a unit."""
    if group_of(module) is not None:
        raise ValueError(f"this {type(module).__name__} is sharded already")
    for name, each in module.named_modules():
        if group_of(each) is not None:
            yield f"unit {name}, sharded already"
    dtype: torch.dtype | None = None
    for prefix, owner in own_modules(module):
        for short, buffer in owner._buffers.items():
            if buffer is not None:
                yield words("buffer", prefix + short, buffer)
        for short, parameter in owner._parameters.items():
            if parameter is None or parameter in ignored:
                continue
            name = f"parameter {prefix}{short}"
            if hasattr(parameter, "was_sharded"):
                raise ValueError(f"{name} is in another unit, too: share it within one unit")
            if parameter.ndim == 0:
                raise ValueError(f"{name} has no rows: give it the shape (1,), or ignore it")
            dtype = dtype or parameter.dtype
            if parameter.dtype != dtype:
                raise ValueError(
                    f"{name} is {parameter.dtype}, and others of its unit are {dtype}: make its "
                    "module a unit of its own, or ignore it"
                )
            yield words("parameter", prefix + short, parameter)


def _distribute(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a unit is loaded: of whole tensors this rank's rows. No rank needs the others."""
    module.fsdp_group.reshard()
    for each in module.fsdp_group.parameters:
        for name in (prefix + name for name in each.names):
            value = state.get(name)
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                if value.shape == each.sharded.shape:  # else torch says what does not fit
                    state[name] = each.rows_of(value)
