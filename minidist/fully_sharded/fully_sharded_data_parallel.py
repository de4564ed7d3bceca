"""Torch's first form: a wrapper around a module, and units by a policy.

Lesson: fsdp_in_practice
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)

from minidist import rank
from minidist.common import agree
from minidist.common.groups import groups_of
from minidist.common.materialize import Modules, materialize, state_of
from minidist.common.no_sync import Synchronized
from minidist.common.norm import clip_grad_norm_
from minidist.common.wrapper import Wrapper
from minidist.fully_sharded.checkpoint import StateTypes, make_whole
from minidist.fully_sharded.flat_shard import partial_of
from minidist.fully_sharded.fsdp_module import FSDPModule, groups_in
from minidist.fully_sharded.fully_shard import make_unit, mesh_of, own_modules, require_alike
from minidist.fully_sharded.options import Options
from minidist.fully_sharded.summon import summoned
from minidist.fully_sharded.wrap_policies import Policy, chosen

KEEPS = {  # these keep the parameters from the forward to the backward pass
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy._HYBRID_SHARD_ZERO2,
}
HYBRID = {ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2}
# These change nothing: what they ask for is always done, or is not to be asked for here.
ALWAYS = {"use_orig_params", "sync_module_states", "forward_prefetch", "limit_all_gathers"}
ALWAYS |= {"device_id", "backward_prefetch"}


class FullyShardedDataParallel(Synchronized, StateTypes):
    """Trains replicas of `module` of which no rank has a whole one. ZeRO, stage 3.

        model = md.FullyShardedDataParallel(model, auto_wrap_policy=by_class(Block))
        optimizer = torch.optim.Adam(model.parameters())     # after, not before

    Then train as with `DistributedDataParallel`. The module becomes a unit, in place, and so do the
    parts that the policy chooses: the parameters of a unit are gathered for its forward and its
    backward pass, and freed after each. Parts can also be wrapped by hand, before the whole.
    `parameters()` are DTensors of this rank's rows, as `md.fully_shard` makes them: it does the
    work. When `backward()` returns, the `.grad` of each is this rank's rows of the mean gradient. A
    parameter without gradient on some ranks counts there as zero; on all ranks, its `.grad` stays
    as it was.

    process_group: the ranks that take part; None is the default group.
    auto_wrap_policy: `by_class`, `by_size`, or one of torch's policies that are functions.
    mixed_precision: torch's `MixedPrecision`. Parameters are cast to its `param_dtype` for the
        forward and backward passes, and the root's inputs; inputs of units with
        `cast_forward_inputs`; gradients to its `reduce_dtype` while they travel; buffers to its
        `buffer_dtype` for good.
    reshard_after_forward: False keeps the parameters from forward to backward. That saves one of
        two all_gathers, and costs the memory of the whole unit.
    param_init_fn: gives values to a module on the device "meta", on `minidist.rank.device()`; None
        calls its `reset_parameters()`. Units are made one by one: no rank holds the whole model.
    prefetch: gather the next unit while one computes.
    sharding_strategy: torch's. SHARD_GRAD_OP is `reshard_after_forward=False`.
    device_mesh: instead of a process group; of two axes for HYBRID_SHARD: shards along the second,
        which are replicated along the first.
    cpu_offload: torch's. Shards and their gradients, and so the optimizer, are on the CPU.
    always: torch's other arguments that ordinary scripts pass, such as `use_orig_params`,
        `device_id`, `sync_module_states` and `backward_prefetch`. They change nothing.

    `state_dict()` is whole, on the CPU, unless `state_dict_type` says otherwise. At construction
    every rank takes what rank 0 has; for buffers, before each forward pass too. Raises ValueError,
    on every rank, if the ranks have different models or units, if a parameter would be in two
    units, or has no dimension; RuntimeError without a process group; ValueError or TypeError for an
    argument that makes no sense.

    Limits: those of `fully_shard`. Batch norms compute in `param_dtype` as all others do, and keep
    their running means in `buffer_dtype`: leave that None for them.

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
        sharding_strategy: ShardingStrategy | None = None,
        device_mesh: DeviceMesh | None = None,
        cpu_offload: CPUOffload | None = None,
        **always: Any,
    ) -> None:
        super().__init__(module)
        self.register_state_dict_post_hook(make_whole)
        if unknown := always.keys() - ALWAYS:
            raise TypeError(f"FullyShardedDataParallel has no argument {', '.join(unknown)}")
        groups = groups_of(process_group, device_mesh, type(self).__name__, most_axes=2)
        given = mixed_precision or MixedPrecision()
        offloads = cpu_offload is not None and cpu_offload.offload_params
        options = Options(
            device_mesh or mesh_of(groups[0], module, offloads),
            groups,
            MixedPrecisionPolicy(
                given.param_dtype,
                given.reduce_dtype,
                cast_forward_inputs=given.cast_forward_inputs,
            ),
            reshards(sharding_strategy, len(groups)) and reshard_after_forward,
            offloads,
        )

        def choose() -> dict[str, nn.Module]:
            return chosen(module, auto_wrap_policy) if auto_wrap_policy else {}

        for part in [*require_alike(module, options, choose).values(), module]:
            own = list(own_modules(part))
            there = (tensor.device for tensor in state_of(own) if not tensor.is_meta)
            with agree.together(*groups):
                materialize(own, next(there, rank.device()), param_init_fn)
            cast_buffers(own, given.buffer_dtype)
            make_unit(part, options)
        for group in groups_in(module)[1:]:  # one that was wrapped by hand is no root any more
            group.casts_inputs = group.options.precision.cast_forward_inputs
        module.fsdp_group.casts_inputs = given.cast_root_forward_inputs  # type: ignore[union-attr]
        if not prefetch:
            for group in groups_in(module):
                group.next_forward = group.next_backward = []

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that have a shard each."""
        group: dist.ProcessGroup = self.module.fsdp_group.options.groups[0]
        return group

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """By the names of the bare module."""
        for name, parameter in super().named_parameters("", recurse, remove_duplicate):
            at: Any = self
            words = [prefix] if prefix else []
            for word in name.split("."):
                if not (isinstance(at, Wrapper) and word == "module"):
                    words.append(word)
                at = getattr(at, word)
            yield ".".join(words), parameter

    def _fqn_modifiers(self) -> dict[str, str]:
        """For torch.distributed.checkpoint.state_dict: the child that adds nothing to names."""
        return {"": "module"}

    # ---- training --------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own, between gathering its parameters and freeing them."""
        if not isinstance(self.module, FSDPModule):
            raise RuntimeError("the module has been replaced since it was wrapped. Wrap this one")
        return self.module(*inputs, **kwargs)

    @property
    def require_backward_grad_sync(self) -> bool:
        """False does what `no_sync` does, until it is True again: the backward passes that follow
        reduce nothing. See `set_requires_gradient_sync` of `FSDPModule`."""
        sync: bool = self.module.fsdp_group.syncs
        return sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, sync: bool) -> None:
        self.module.set_requires_gradient_sync(sync)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within the block reduce nothing: see `set_requires_gradient_sync` of
        `FSDPModule`. As with torch's class, the backward pass decides, not its forward pass."""
        with super().no_sync():
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that their norm, that of all ranks' rows together, is at most
        `max_norm`. Returns what it was, a number. All ranks must call it.

        torch.nn.utils.clip_grad_norm_ does the same, but that it counts ignored parameters, and
        raises where a rank has no rows of a parameter and `norm_type` is infinite.
        """
        parameters = [each.sharded for group in groups_in(self) for each in group.parameters]
        groups = {group.options.groups[0] for group in groups_in(self)}
        # Within no_sync DTensor adds up; units of several meshes it refuses.
        if len(groups) > 1 or any(partial_of(p) is not None for p in parameters):
            # One by one: torch 2.11 loses what it writes into several such sums at once.
            norm: Any = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, foreach=False)
            return torch.as_tensor(norm.full_tensor())
        device = torch.device(self.module.fsdp_group.options.mesh.device_type)
        return clip_grad_norm_(
            parameters, max_norm, norm_type, groups=[self.process_group], device=device
        )

    # ---- of this class, or of any module around some: as torch has them --------------------

    def fsdp_modules(self, root_only: bool = False) -> list[nn.Module]:
        """The modules within this one with which a unit begins; or the outermost ones."""
        groups = groups_in(self)
        if root_only:
            groups = [group for group in groups if group is group.module.fsdp_state.root]
        return [group.module for group in groups]

    def check_is_root(self) -> bool:
        """Whether it is in no other unit."""
        return bool(self.module.fsdp_state.root is self.module.fsdp_group)

    def apply(self, fn: Callable[[nn.Module], Any]) -> Any:
        """`fn` of each module, with its full parameters. Each rank keeps its rows of what they have
        become: so `fn` must do the same on all ranks. All ranks must call it."""
        if any(group.summoned for group in groups_in(self)):  # by the wrapper around this one
            return super().apply(fn)
        with self.summon_full_params():
            return super().apply(fn)

    @contextmanager
    def summon_full_params(
        self,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Within the block the module has its full parameters, in their own dtype, for any use but
        training: rank 0 alone may call it. After it, each rank keeps its rows of what they have
        become, if `writeback`: so change them alike on all ranks. All ranks must enter it. Raises
        RuntimeError if an optimizer takes a step meanwhile: it would be overwritten.

        recurse: also those of units within. rank0_only: only on rank 0 of all, without `writeback`.
        offload_to_cpu: there. with_grads: and the gradients.
        """
        device = torch.device("cpu") if offload_to_cpu else None
        groups = groups_in(self)[: None if recurse else 1]
        with summoned(groups, writeback, rank0_only, device, with_grads):
            yield


def reshards(strategy: ShardingStrategy | None, axes: int) -> bool:
    """Whether parameters are freed after the forward pass. Raises ValueError for a strategy that
    does not fit a mesh of so many axes."""
    if strategy is ShardingStrategy.NO_SHARD:
        raise ValueError("NO_SHARD: that is DistributedDataParallel")
    if strategy is not None and (strategy in HYBRID) != (axes == 2):
        raise ValueError(
            f"sharding_strategy {strategy.name} with a mesh of {axes} axes: hybrid sharding "
            "needs a device_mesh of two, (replicas, shards), and the others one"
        )
    return strategy not in KEEPS


def cast_buffers(own: Modules, dtype: torch.dtype | None) -> None:
    """Those of floating numbers; None changes nothing."""
    for _, module in own:
        for name, buffer in module._buffers.items():
            if dtype and buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)
