"""What torch's FullyShardedDataParallel is told by, in our own terms. Lesson: fully_sharded"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

KEEPS = {  # strategy: whether parameters stay from the forward to the backward pass
    ShardingStrategy.FULL_SHARD: False,
    ShardingStrategy.SHARD_GRAD_OP: True,
    ShardingStrategy.HYBRID_SHARD: False,
    ShardingStrategy._HYBRID_SHARD_ZERO2: True,
}
HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
# Arguments of torch's that change nothing here, whatever they are: all of this is always done.
ALWAYS = {"use_orig_params", "sync_module_states", "forward_prefetch", "limit_all_gathers"}


@dataclass(frozen=True)
class Precision:
    """What is cast, of `MixedPrecision`. `kept`: classes of modules that compute in the dtype of
    their own parameters."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    casts_inputs: bool = False
    casts_root_inputs: bool = False
    kept: tuple[type[nn.Module], ...] = ()


@dataclass(frozen=True)
class Ignored:
    """Modules and parameters that are in no unit: they stay as they are on each rank."""

    modules: frozenset[nn.Module] = frozenset()
    parameters: frozenset[nn.Parameter] = frozenset()


def precision(given: MixedPrecision | None) -> Precision:
    """Raises TypeError if it is something else, ValueError for what has no meaning here."""
    if given is None:
        return Precision()
    if not isinstance(given, MixedPrecision):
        raise TypeError(f"mixed_precision is a MixedPrecision, not {given!r}")
    if given.keep_low_precision_grads:
        raise ValueError(
            "keep_low_precision_grads: here a .grad has the dtype of its shard, in which the "
            "ranks' gradients are also added up over several passes"
        )
    return Precision(
        given.param_dtype,
        given.reduce_dtype,
        given.buffer_dtype,
        given.param_dtype is not None and given.cast_forward_inputs,
        given.param_dtype is not None and given.cast_root_forward_inputs,
        tuple(given._module_classes_to_ignore) if given.param_dtype else (),
    )


def reshards(strategy: ShardingStrategy | None, wanted: bool, mesh: Any) -> bool:
    """Whether parameters are freed after the forward pass. Raises ValueError for a strategy that
    does not fit."""
    if strategy is None:
        return wanted
    if strategy is ShardingStrategy.NO_SHARD:
        raise ValueError(
            "sharding_strategy NO_SHARD: every rank would have the whole model. That is "
            "DistributedDataParallel"
        )
    if strategy not in KEEPS:
        raise TypeError(f"sharding_strategy is a ShardingStrategy, not {strategy!r}")
    axes = 1 if mesh is None else mesh.ndim
    if (strategy in HYBRID) != (axes == 2):
        raise ValueError(
            f"sharding_strategy {strategy.name} with a mesh of {axes} axes: hybrid sharding needs "
            "a device_mesh of two, (replicas, shards), and the others one"
        )
    return wanted and not KEEPS[strategy]


def offloads(given: CPUOffload | None) -> bool:
    """Whether shards are on the CPU. Raises TypeError if it is something else."""
    if given is not None and not isinstance(given, CPUOffload):
        raise TypeError(f"cpu_offload is a CPUOffload, not {given!r}")
    return given is not None and given.offload_params


def prefetches(given: BackwardPrefetch | None, wanted: bool) -> bool:
    """Whether the next unit is gathered ahead. Raises ValueError for another time than ours."""
    if given is BackwardPrefetch.BACKWARD_POST:
        raise ValueError(
            "backward_prefetch BACKWARD_POST: here the next unit is gathered while one computes, "
            "which is BACKWARD_PRE, or not ahead at all, which is None"
        )
    return wanted and given is not None


def ignored(modules: Iterable[nn.Module] | None, states: Iterable[Any] | None) -> Ignored:
    """Of torch's two arguments, of which one may be given. Raises ValueError or TypeError."""
    if modules is not None and states is not None:
        raise ValueError("give ignored_modules or ignored_states, not both")
    found = [*(modules or ()), *(states or ())]
    for each in found:
        if not isinstance(each, nn.Module | nn.Parameter):
            raise TypeError(f"ignored are modules or parameters, not {type(each).__name__}")
    roots = [each for each in found if isinstance(each, nn.Module)]
    inside = [p for root in roots for p in root.parameters()]
    single = [each for each in found if isinstance(each, nn.Parameter)]
    return Ignored(
        frozenset(module for root in roots for module in root.modules()),
        frozenset([*inside, *single]),
    )


def require_known(names: Iterable[str]) -> None:
    """Raises TypeError for an argument that torch has not either."""
    for name in names:
        if name not in ALWAYS:
            raise TypeError(f"FullyShardedDataParallel has no argument {name}")


def require_device(device_id: int | torch.device | None, found: torch.device) -> None:
    """Raises ValueError if the module is elsewhere: nothing is moved."""
    if device_id is None:
        return
    wanted = torch.device(device_id)
    if wanted.type != found.type or wanted.index not in (None, found.index):
        raise ValueError(f"device_id is {wanted}, and the module is on {found}: move it first")
