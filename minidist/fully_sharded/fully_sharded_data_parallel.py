"""Torch's first form: a wrapper around a module, and units by a policy.

A policy is a function of torch's form, `policy(module=..., recurse=..., nonwrapped_numel=...)`, so
torch's own serve as well, such as `ModuleWrapPolicy` and `size_based_auto_wrap_policy`. With
`recurse` it says whether to look into a module; without, whether to wrap it, of which
`nonwrapped_numel` parameters are in no unit yet. Lesson: fsdp_in_practice
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
)
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    _recursive_wrap,
    size_based_auto_wrap_policy,
)
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from minidist import rank
from minidist.common import agree
from minidist.common.groups import groups_of
from minidist.common.materialize import Modules, materialize, state_of
from minidist.common.no_sync import Synchronized
from minidist.fully_sharded.fsdp_module import group_of, groups_in
from minidist.fully_sharded.fully_shard import fully_shard, mesh_of, own_modules

Policy = Callable[..., bool]
# These change nothing: what they ask for is always done, or is not to be asked for here.
ALWAYS = {"use_orig_params", "sync_module_states", "forward_prefetch", "limit_all_gathers"}
ALWAYS |= {"device_id", "backward_prefetch"}


class FullyShardedDataParallel(Synchronized):
    """Trains replicas of `module` of which no rank has a whole one. ZeRO, stage 3.

        model = md.FullyShardedDataParallel(model, auto_wrap_policy=by_class(Block))
        optimizer = torch.optim.Adam(model.parameters())     # after, not before

    Then train as with `DistributedDataParallel`. `md.fully_shard` makes a unit of the module, in
    place, and of each part that the policy chooses. A unit's parameters are gathered for its
    forward and its backward pass, and freed after each; `parameters()` are DTensors of this rank's
    rows, and so is their `.grad` when `backward()` returns, of the mean gradient. A parameter
    without gradient on some ranks counts there as zero; on all ranks, its `.grad` stays as it was.

    process_group: the ranks that take part; None is the default group.
    auto_wrap_policy: `by_class`, `by_size`, or one of torch's policies that are functions.
    mixed_precision: torch's. Parameters and inputs are cast to `param_dtype`; gradients to
        `reduce_dtype` while they travel; buffers to `buffer_dtype` for good.
    reshard_after_forward: False keeps the parameters from forward to backward, as SHARD_GRAD_OP
        does in torch. That saves one of two all_gathers, and costs the memory of the whole unit.
    param_init_fn: gives values to a module on the device "meta", on `minidist.rank.device()`; None
        calls its `reset_parameters()`. Units are made one by one: no rank holds the whole model.
    prefetch: gather the next unit while one computes.
    device_mesh: instead of a process group; of two axes for hybrid sharding: shards along the
        second, which are replicated along the first.
    cpu_offload: torch's. Shards and their gradients, and so the optimizer, are on the CPU.
    always: torch's other arguments that ordinary scripts pass, such as `use_orig_params` and
        `device_id`. They change nothing: move the module to its device before.

    `state_dict()` is whole, on the CPU: all ranks call it. With keep_vars=True, or of `module`, it
    has DTensors; all of these load. Of the optimizer take torch's `get_optimizer_state_dict`. At
    construction every rank takes what rank 0 has; for buffers, before each forward pass too.

    Raises what `fully_shard` does; on every rank, ValueError if their policies choose other units;
    TypeError for an unknown argument; RuntimeError without a process group. Limits: those of
    `fully_shard`. Batch norms compute in `param_dtype` as all others do, and keep their running
    means in `buffer_dtype`: leave that None for them. Parts are chosen by the policy or sharded by
    `fully_shard`, not wrapped by hand.

    Zhao et al. (arXiv 2304.11277). Lesson: fully_sharded
    """

    module: Any  # the outermost unit

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        auto_wrap_policy: Policy | None = None,
        mixed_precision: MixedPrecision | None = None,
        *,
        reshard_after_forward: bool = True,
        param_init_fn: Callable[[nn.Module], object] | None = None,
        prefetch: bool = True,
        device_mesh: DeviceMesh | None = None,
        cpu_offload: CPUOffload | None = None,
        **always: Any,
    ) -> None:
        super().__init__(module)
        self.register_state_dict_post_hook(_make_whole)
        if unknown := always.keys() - ALWAYS:
            raise TypeError(f"FullyShardedDataParallel has no argument {', '.join(unknown)}")
        groups = groups_of(process_group, device_mesh, type(self).__name__, most_axes=2)
        offloads = cpu_offload is not None and cpu_offload.offload_params
        mesh = device_mesh or mesh_of(groups[0], module, offloads)
        given = mixed_precision or MixedPrecision()
        with agree.together(*groups):
            parts = chosen(module, auto_wrap_policy) if auto_wrap_policy else []
        for part in [*parts, module]:
            own = list(own_modules(part))
            there = (tensor.device for tensor in state_of(own) if not tensor.is_meta)
            with agree.together(*groups):
                materialize(own, next(there, rank.device()), param_init_fn)
            _cast_buffers(own, given.buffer_dtype)
            cast = given.cast_root_forward_inputs if part is module else given.cast_forward_inputs
            dtypes = given.param_dtype, given.reduce_dtype
            fully_shard(
                part,
                mesh=mesh,
                reshard_after_forward=reshard_after_forward,
                mp_policy=MixedPrecisionPolicy(*dtypes, cast_forward_inputs=cast),
                offload_policy=CPUOffloadPolicy() if offloads else None,
            )
        for unit in groups_in(module):
            unit.prefetches = prefetch

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """By the names of the bare module, as torch's `get_optimizer_state_dict` needs them."""
        yield from self.module.named_parameters(*args, **kwargs)

    def _fqn_modifiers(self) -> dict[str, str]:
        """For torch.distributed.checkpoint.state_dict: the child that adds nothing to names."""
        return {"": "module"}

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own, between gathering its parameters and freeing them. Within `no_sync` the
        backward pass that follows reduces nothing: see `set_requires_gradient_sync`."""
        self.module.set_requires_gradient_sync(self.require_backward_grad_sync)
        return self.module(*inputs, **kwargs)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Torch's function, which takes DTensors: scale the gradients so that their norm, that of
        all ranks' rows together, is at most `max_norm`. Returns what it was, a number. All ranks
        must call it."""
        norm: Any = clip_grad_norm_(self.parameters(), max_norm, norm_type)
        return norm.full_tensor()


def _make_whole(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    """After `state_dict`: DTensors become whole tensors, on the CPU."""
    for name, value in state.items():
        kept = isinstance(value, nn.Parameter)  # keep_vars=True
        if name.startswith(prefix) and isinstance(value, DTensor) and not kept:
            alone = value.device_mesh.size() == 1  # then the whole tensor is the parameter's own
            state[name] = value.full_tensor().to("cpu", copy=alone)


def _cast_buffers(own: Modules, dtype: torch.dtype | None) -> None:
    """Those of floating numbers; None changes nothing."""
    for _, module in own:
        for name, buffer in module._buffers.items():
            if dtype and buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


# ---- policies ----------------------------------------------------------------------------------


def by_class(*classes: type[nn.Module]) -> Policy:
    """A policy that wraps all modules of these classes, such as the blocks of a transformer. Do not
    name parts of torch's `nn.TransformerEncoderLayer` or `nn.MultiheadAttention`: these read the
    parameters of their parts themselves. Lesson: fsdp_in_practice"""
    return ModuleWrapPolicy(classes)


def by_size(min_num_params: int) -> Policy:
    """A policy that wraps modules, the inner ones first, that have so many parameters which are in
    no unit yet. Lesson: fsdp_in_practice"""
    return partial(size_based_auto_wrap_policy, min_num_params=min_num_params)


def chosen(module: nn.Module, policy: Policy) -> list[nn.Module]:
    """The modules within this one that the policy wants to be units, inner ones first: those that
    torch would wrap."""
    found: dict[nn.Module, None] = {}

    def note(part: nn.Module) -> nn.Module:
        if group_of(part) is None:
            found[part] = None
        return part

    _recursive_wrap(module, policy, note, set(), set(), only_wrap_children=True)
    return [*found]
