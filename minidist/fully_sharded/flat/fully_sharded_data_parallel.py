"""Torch's first form: a wrapper around a module, and around the parts of it that are units."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)

from minidist.common.groups import groups_of
from minidist.common.no_sync import Synchronized
from minidist.common.wrapper import Wrapper
from minidist.fully_sharded.flat import sharded_optimizer_states as optimizer_states
from minidist.fully_sharded.flat import sharded_states
from minidist.fully_sharded.flat import torch_arguments as given
from minidist.fully_sharded.flat.build_unit import require_alike, shard
from minidist.fully_sharded.flat.unit_policies import Policy, chosen
from minidist.fully_sharded.flat.units import Unit, root_of


class FullyShardedDataParallel(Synchronized):
    """Trains replicas of `module` of which no rank has a whole one. ZeRO, stage 3.

        model = md.FullyShardedDataParallel(model, auto_wrap_policy=by_class(Block))
        optimizer = torch.optim.Adam(model.parameters())     # after, not before

    Then train as with `DistributedDataParallel`. The module becomes a unit, in place, and so do the
    parts that the policy chooses: the parameters of a unit are gathered for its forward and its
    backward pass, and freed after each. Parts can also be wrapped by hand, before the whole.
    `parameters()` are this rank's local shards, of which some may be empty: (n,), of matrices
    (n, 1), and so on, so that groups by `p.dim()` stay what they are. The optimizer must be an
    elementwise one (Adam, SGD, ...; not Adafactor, LBFGS or Muon). When `backward()` returns, the
    `.grad` of each is its part of the mean gradient. A parameter without gradient on some ranks
    counts there as zero; on all ranks, its `.grad` stays as it was.

    process_group: the ranks that take part; None is the default group.
    auto_wrap_policy: `by_class`, `by_size`, or one of torch's policies that are functions.
    mixed_precision: torch's `MixedPrecision`. Parameters are cast to its `param_dtype` for the
        forward and backward passes, and the root's inputs; inputs of units with
        `cast_forward_inputs`; gradients to its `reduce_dtype` while they travel; buffers to its
        `buffer_dtype` for good. Batch norms stay as they are, and so do shards and their gradients.
    reshard_after_forward: False keeps the parameters from forward to backward. That saves one of
        two all_gathers, and costs the memory of the whole unit.
    param_init_fn: gives values to a module on the device "meta", on `minidist.rank.device()`; None
        calls its `reset_parameters()`. Units are made one by one: no rank holds the whole model.
    prefetch: gather the next unit while one computes.

    As torch's class has them: `sharding_strategy` (SHARD_GRAD_OP is `reshard_after_forward=False`);
    `device_mesh` instead of a process group, of two axes for HYBRID_SHARD: shards along the second,
    which are replicated along the first; `cpu_offload`: shards and their gradients, and so the
    optimizer, are on the CPU; `backward_prefetch`; `device_id`, where the module is; and
    `ignored_modules` or `ignored_states`: modules and parameters that stay as they are on each
    rank, and whose gradients nobody averages. `use_orig_params`, `sync_module_states`,
    `forward_prefetch` and `limit_all_gathers` are what is always done here.

    At construction every rank takes what rank 0 has; for buffers, before each forward pass too.
    Raises ValueError, on every rank, if the ranks have different models or units, or if a parameter
    would be in two units; RuntimeError without a process group; ValueError or TypeError for an
    argument that makes no sense. `backward` raises autograd's RuntimeError about FullParameters and
    "an inplace operation" where it comes to a unit by a tensor that was neither in its output nor
    an attribute of its modules, but in a closure. Lesson: fully_sharded
    """

    fsdp_unit: Unit

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
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        device_id: int | torch.device | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        ignored_states: Iterable[Any] | None = None,
        **always: Any,
    ) -> None:
        super().__init__(module)
        groups = groups_of(process_group, device_mesh, type(self).__name__, most_axes=2)
        given.require_known(always)
        if ignored_modules is not None and ignored_states is not None:
            raise ValueError("give ignored_modules or ignored_states, not both")
        offload = given.of_type("cpu_offload", cpu_offload, CPUOffload)
        modules, parameters = given.ignored([*(ignored_modules or ()), *(ignored_states or ())])
        options = given.Options(
            groups,
            device_mesh,
            given.precision(mixed_precision),
            reshards=given.reshards(sharding_strategy, len(groups)) and reshard_after_forward,
            prefetches=given.prefetches(backward_prefetch) and prefetch,
            offloads=offload is not None and offload.offload_params,
            param_init_fn=param_init_fn,
            ignored_modules=modules,
            ignored_parameters=parameters,
        )

        def choose() -> dict[str, nn.Module]:
            return chosen(module, auto_wrap_policy, modules) if auto_wrap_policy else {}

        for part in [*require_alike(module, options, choose).values(), module]:
            shard(part, options, sharded_states.wholes, device_id)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that have a shard each."""
        return self.fsdp_unit.options.groups[0]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's local shards, by the names of the bare module."""
        for name, parameter in super().named_parameters("", recurse, remove_duplicate):
            at: Any = self
            words = [prefix] if prefix else []
            for word in name.split("."):
                if not (isinstance(at, Wrapper) and word == "module"):
                    words.append(word)
                at = getattr(at, word)
            yield ".".join(words), parameter

    def _fqn_modifiers(self) -> dict[str, str]:
        return {**self.fsdp_unit.module._fqn_modifiers(), "": "module"}  # type: ignore[operator]

    # ---- training --------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own, between gathering its parameters and freeing them."""
        if not hasattr(self.module, "fsdp_unit"):
            raise RuntimeError("the module has been replaced since it was wrapped. Wrap this one")
        return self.module(*inputs, **kwargs)

    @property
    def require_backward_grad_sync(self) -> bool:
        """False does what `no_sync` does, until it is True again. Until then the `.grad` of a local
        shard is only this rank's own."""
        return self.fsdp_unit.schedule.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, sync: bool) -> None:
        root_of(self, "require_backward_grad_sync").sync = sync

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that their norm, that of all shards together, is at most
        `max_norm`. Returns what it was, a number. All ranks must call it.

        torch.nn.utils.clip_grad_norm_ does the same. Here ignored parameters do not count. Raises
        RuntimeError for gradients of a pass within `no_sync`, which are not reduced yet.
        """
        flats = self.fsdp_unit.schedule.flats
        shards = [each.local for flat in flats for each in flat.parameters]
        return nn.utils.clip_grad_norm_(shards, max_norm, norm_type, foreach=True)

    # ---- states ----------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Take this rank's part of a whole state, the same on every rank, or of a sharded one. All
        ranks must call it. Raises ValueError, on every rank, and changes nothing, if it is of
        another model."""
        sharded_states.require_fitting(self, state_dict, strict, assign)
        return super().load_state_dict(state_dict, strict)

    @contextmanager
    def state_dict_type(
        self, state_dict_type: StateDictType, *configs: Any, **more: Any
    ) -> Iterator[None]:
        """As torch has it: within the block, `state_dict` is whole (FULL_STATE_DICT, as without),
        or has a DTensor of this rank's rows for each parameter (SHARDED_STATE_DICT). The
        configurations save memory in torch, and change nothing here. Raises ValueError for
        LOCAL_STATE_DICT."""
        if state_dict_type is StateDictType.LOCAL_STATE_DICT:
            raise ValueError("LOCAL_STATE_DICT fits this number of ranks only: SHARDED_STATE_DICT")
        sharded = state_dict_type is StateDictType.SHARDED_STATE_DICT
        form = sharded_states.in_rows if sharded else lambda _: sharded_states.wholes
        with sharded_states.formed(self, form):
            yield

    optim_state_dict = optimizer_states.optim_state_dict
    load_optim_state_dict = optimizer_states.load_optim_state_dict
    optim_state_dict_to_load = optimizer_states.optim_state_dict_to_load
    summon_full_params = sharded_states.summon_full_params
