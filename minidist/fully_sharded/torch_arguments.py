"""What a unit is told; and arguments of torch's FullyShardedDataParallel: what they mean here, or
why not. Lesson: fsdp_in_practice
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.tensor import Placement, Replicate, Shard

from minidist.common.refusals import refuse

T = TypeVar("T")
WHO = "FullyShardedDataParallel"
KEEPS = {  # whether a strategy keeps the parameters from the forward to the backward pass
    ShardingStrategy.FULL_SHARD: False,
    ShardingStrategy.SHARD_GRAD_OP: True,
    ShardingStrategy.HYBRID_SHARD: False,
    ShardingStrategy._HYBRID_SHARD_ZERO2: True,
}
HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
# These change nothing, whatever they are: all of this is always done.
ALWAYS = {"use_orig_params", "sync_module_states", "forward_prefetch", "limit_all_gathers"}
NOT_HERE = {
    "keep_low_precision_grads": "here a .grad has the dtype of its shard, in which the ranks' "
    "gradients are also added up over several passes",
    "sharding_strategy": "every rank would have the whole model. That is DistributedDataParallel",
    "backward_prefetch": "here the next unit is gathered while one computes, which is "
    "BACKWARD_PRE, or not ahead at all, which is None",
}
REFUSED = {  # methods
    "register_comm_hook": "gradients are reduced by the process group",
    "full_optim_state_dict": "call optim_state_dict(optimizer)",
    "sharded_optim_state_dict": "call optim_state_dict(optimizer, sharded=True)",
    "shard_full_optim_state_dict": "load_optim_state_dict(optimizer, state) takes a whole one",
    "flatten_sharded_optim_state_dict": "load_optim_state_dict(optimizer, state) takes DTensors",
    "scatter_full_optim_state_dict": "broadcast the whole one, and call load_optim_state_dict",
    "rekey_optim_state_dict": "call optim_state_dict(optimizer, by_name=True)",
    "get_state_dict_type": "set_state_dict_type returns the one before",
}


@dataclass(frozen=True, eq=False)
class Options:
    """What a unit is told. The ranks of `groups[0]` have a shard each; with hybrid sharding,
    those of `groups[1]` have the same one."""

    mesh: DeviceMesh
    groups: tuple[dist.ProcessGroup, ...]
    precision: MixedPrecisionPolicy
    reshards: bool | None  # after forward. None: if it is not the root
    offloads: bool
    ignored: frozenset[nn.Parameter] = frozenset()
    ignored_modules: frozenset[nn.Module] = frozenset()

    @property
    def placements(self) -> list[Placement]:
        """Of every parameter."""
        return [Replicate()] * (self.mesh.ndim - 1) + [Shard(0)]


def of_type(name: str, value: T | None, kind: type[T]) -> T | None:
    """The value. Raises TypeError if it is something else."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} is a {kind.__name__}, not {value!r}")
    return value


def precision(given: MixedPrecision | None) -> MixedPrecision:
    """Raises TypeError or ValueError for what has no meaning here."""
    given = of_type("mixed_precision", given, MixedPrecision)
    given = given or MixedPrecision()
    refuse(WHO, {"keep_low_precision_grads": given.keep_low_precision_grads}, NOT_HERE)
    return given


def reshards(strategy: ShardingStrategy | None, axes: int) -> bool:
    """Whether parameters are freed after the forward pass. Raises TypeError or ValueError for a
    strategy that does not fit a mesh of so many axes."""
    of_type("sharding_strategy", strategy, ShardingStrategy)
    if strategy is ShardingStrategy.NO_SHARD:
        refuse(WHO, {"sharding_strategy": strategy}, NOT_HERE)
    if strategy is not None and (strategy in HYBRID) != (axes == 2):
        raise ValueError(
            f"sharding_strategy {strategy.name} with a mesh of {axes} axes: hybrid sharding "
            "needs a device_mesh of two, (replicas, shards), and the others one"
        )
    return strategy is None or not KEEPS[strategy]


def prefetches(given: BackwardPrefetch | None) -> bool:
    """Whether the next unit is gathered ahead. Raises ValueError for another time than ours."""
    if given is BackwardPrefetch.BACKWARD_POST:
        refuse(WHO, {"backward_prefetch": given}, NOT_HERE)
    return given is not None


def ignored(
    modules: Iterable[nn.Module] | None, states: Iterable[object] | None
) -> tuple[frozenset[nn.Module], frozenset[nn.Parameter]]:
    """The modules, with all in them, and the parameters. Raises ValueError if both are given, and
    TypeError for anything else."""
    if modules is not None and states is not None:
        raise ValueError("give ignored_modules or ignored_states, not both")
    found, parameters = set[nn.Module](), set[nn.Parameter]()
    for each in (*(modules or ()), *(states or ())):
        if isinstance(each, nn.Module):
            found.update(each.modules())
            parameters.update(each.parameters())
        elif isinstance(each, nn.Parameter):
            parameters.add(each)
        else:
            raise TypeError(f"ignored are modules or parameters, not {type(each).__name__}")
    return frozenset(found), frozenset(parameters)


def require_device(device_id: int | torch.device | None, found: torch.device) -> None:
    """Raises ValueError if the module is elsewhere: nothing is moved."""
    wanted = found if device_id is None else torch.device(device_id)
    if wanted.type != found.type or wanted.index not in (None, found.index):
        raise ValueError(f"device_id is {wanted}, and the module is on {found}: move it first")
