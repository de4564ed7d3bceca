"""The arguments of torch's two forms of fully sharded training, in our terms; or why not.

Lesson: fully_sharded
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from minidist.common.replicas import require_group

KEEPS = {  # whether a strategy keeps the parameters from the forward to the backward pass
    ShardingStrategy.FULL_SHARD: False,
    ShardingStrategy.SHARD_GRAD_OP: True,
    ShardingStrategy.HYBRID_SHARD: False,
    ShardingStrategy._HYBRID_SHARD_ZERO2: True,
}
HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
# Arguments of torch's that change nothing here, whatever they are: all of this is always done.
ALWAYS = {"use_orig_params", "sync_module_states", "forward_prefetch", "limit_all_gathers"}


@dataclass(frozen=True)
class Options:
    """What all units of a root have alike. The ranks of `groups[0]` have a shard each; with hybrid
    sharding, those of `groups[1]` have the same one."""

    groups: tuple[dist.ProcessGroup, ...]
    mesh: DeviceMesh | None
    precision: MixedPrecision
    output_dtype: torch.dtype | None = None
    reshards: bool = True
    prefetches: bool = True
    offloads: bool = False
    param_init_fn: Callable[[nn.Module], object] | None = None
    ignored_modules: frozenset[nn.Module] = frozenset()
    ignored_parameters: frozenset[nn.Parameter] = frozenset()

    @property
    def kept(self) -> tuple[type[nn.Module], ...]:
        """Classes of modules that compute in the dtype of their own parameters."""
        ignored = self.precision._module_classes_to_ignore
        return tuple(ignored) if self.precision.param_dtype else ()


def of_wrapper(
    process_group: dist.ProcessGroup | None,
    mesh: DeviceMesh | None,
    precision: MixedPrecision | None,
    reshards: bool,
    strategy: ShardingStrategy | None,
    offload: CPUOffload | None,
    backward_prefetch: BackwardPrefetch | None,
    prefetch: bool,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[Any] | None,
    param_init_fn: Callable[[nn.Module], object] | None,
    always: Iterable[str],
) -> Options:
    """Of `FullyShardedDataParallel`. Raises TypeError or ValueError for what makes no sense."""
    groups = groups_of(process_group, mesh, "FullyShardedDataParallel")
    for unknown in (name for name in always if name not in ALWAYS):
        raise TypeError(f"FullyShardedDataParallel has no argument {unknown}")
    _require("mixed_precision", precision, MixedPrecision)
    _require("sharding_strategy", strategy, ShardingStrategy)
    _require("cpu_offload", offload, CPUOffload)
    if precision is not None and precision.keep_low_precision_grads:
        raise ValueError(
            "keep_low_precision_grads: here a .grad has the dtype of its shard, in which the "
            "ranks' gradients are also added up over several passes"
        )
    if strategy is ShardingStrategy.NO_SHARD:
        raise ValueError(
            "sharding_strategy NO_SHARD: every rank would have the whole model. That is "
            "DistributedDataParallel"
        )
    if strategy is not None and (strategy in HYBRID) != (len(groups) == 2):
        raise ValueError(
            f"sharding_strategy {strategy.name} with a mesh of {len(groups)} axes: hybrid sharding "
            "needs a device_mesh of two, (replicas, shards), and the others one"
        )
    if backward_prefetch is BackwardPrefetch.BACKWARD_POST:
        raise ValueError(
            "backward_prefetch BACKWARD_POST: here the next unit is gathered while one computes, "
            "which is BACKWARD_PRE, or not ahead at all, which is None"
        )
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError("give ignored_modules or ignored_states, not both")
    modules, parameters = _ignored([*(ignored_modules or ()), *(ignored_states or ())])
    return Options(
        groups,
        mesh,
        precision or MixedPrecision(),
        reshards=reshards and not (strategy and KEEPS[strategy]),
        prefetches=prefetch and backward_prefetch is not None,
        offloads=offload is not None and offload.offload_params,
        param_init_fn=param_init_fn,
        ignored_modules=modules,
        ignored_parameters=parameters,
    )


def of_fully_shard(
    mesh: DeviceMesh | None,
    reshard_after_forward: bool | None,
    precision: MixedPrecisionPolicy | None,
    offload: OffloadPolicy | None,
    ignored_params: Iterable[nn.Parameter] | None,
    not_here: dict[str, Any],
) -> Options:
    """Of `fully_shard`. Raises TypeError or ValueError for what makes no sense here."""
    groups = groups_of(None, mesh, "fully_shard")
    for name in not_here:
        if name not in NOT_HERE:
            raise TypeError(f"fully_shard has no argument {name}")
        if not_here[name] is not None:
            raise ValueError(f"fully_shard: {name}: {NOT_HERE[name]}")
    _require("mp_policy", precision, MixedPrecisionPolicy)
    _require("offload_policy", offload, OffloadPolicy)
    precision = precision or MixedPrecisionPolicy()
    if not isinstance(reshard_after_forward, bool | None):
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward}: parameters are freed after the "
            "forward pass, or not. They cannot be resharded to a smaller group of ranks"
        )
    return Options(
        groups,
        mesh,
        MixedPrecision(
            precision.param_dtype,
            precision.reduce_dtype,
            cast_forward_inputs=precision.cast_forward_inputs,
            cast_root_forward_inputs=precision.cast_forward_inputs,
            _module_classes_to_ignore=(),
        ),
        precision.output_dtype,
        reshards=reshard_after_forward is not False,
        offloads=isinstance(offload, CPUOffloadPolicy),
        ignored_parameters=_ignored(ignored_params or ())[1],
    )


NOT_HERE = {
    "shard_placement_fn": "parameters are cut in one flat tensor, not along an axis of each",
    "dp_mesh_dims": "give the axes that shard as the mesh: mesh['replicas', 'shards']",
}


def groups_of(
    process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None, who: str
) -> tuple[dist.ProcessGroup, ...]:
    """The ranks that have a shard each; of a mesh of two axes also those that have the same."""
    if mesh is not None and process_group is not None:
        raise ValueError(f"give {who} a device_mesh or a process group, not both")
    if mesh is None:
        return (require_group(process_group, who),)
    require_group(None, who)
    if mesh.ndim > 2:
        raise ValueError(f"a mesh of one or two axes is needed, not of {mesh.ndim}")
    return tuple(mesh.get_group(axis) for axis in range(mesh.ndim))[::-1]


def require_device(device_id: int | torch.device | None, found: torch.device) -> None:
    """Raises ValueError if the module is elsewhere: nothing is moved."""
    if device_id is None:
        return
    wanted = torch.device(device_id)
    if wanted.type != found.type or wanted.index not in (None, found.index):
        raise ValueError(f"device_id is {wanted}, and the module is on {found}: move it first")


def _require(name: str, value: Any, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} is a {kind.__name__}, not {value!r}")


def _ignored(found: Iterable[Any]) -> tuple[frozenset[nn.Module], frozenset[nn.Parameter]]:
    modules, parameters = set[nn.Module](), set[nn.Parameter]()
    for each in found:
        if isinstance(each, nn.Module):
            modules.update(each.modules())
            parameters.update(each.parameters())
        elif isinstance(each, nn.Parameter):
            parameters.add(each)
        else:
            raise TypeError(f"ignored are modules or parameters, not {type(each).__name__}")
    return frozenset(modules), frozenset(parameters)
