"""Stage 3 (lesson 9): a rank holds no more of anything than its shard."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils._pytree import tree_map

from minidist.common import agree
from minidist.common.norm import norm_over_ranks
from minidist.common.replicas import (
    broadcast_state,
    require_group,
    require_same_lines,
)
from minidist.common.wrapper import Wrapper
from minidist.fully_sharded import build, options
from minidist.fully_sharded.flat import Kind
from minidist.fully_sharded.journey import in_backward
from minidist.fully_sharded.schedule import Schedule
from minidist.fully_sharded.state_dicts import StateDicts
from minidist.fully_sharded.unit import Unit
from minidist.fully_sharded.wrap import Policy, chosen, replace


class FullyShardedDataParallel(StateDicts):
    """Trains replicas of `module` of which no rank has a whole one. ZeRO, stage 3. Lesson 9.

        model = md.FullyShardedDataParallel(model, auto_wrap_policy=by_class(Block))
        optimizer = torch.optim.Adam(model.parameters())     # after, not before

    Then train as with `DistributedDataParallel`. A module that is wrapped is a unit: its parameters
    are gathered for its forward and its backward pass, and freed after each. Wrap parts of a model
    by hand, then the whole; or have the parts chosen by a policy. `parameters()` are this rank's
    pieces of the parameters, of which some may be empty: (n,), of matrices (n, 1), and so on, so
    that groups by `p.dim()` stay what they are. The optimizer must be an elementwise one (Adam,
    SGD, ...; not Adafactor, LBFGS or Muon). When `backward()` returns, the `.grad` of each
    piece is its part of the mean gradient. A parameter without gradient on some ranks counts there
    as zero; on all ranks, its `.grad` stays as it was. All ranks must use the same units, in the
    same order.

    process_group: the ranks that take part; None is the default group.
    auto_wrap_policy: which modules within this one to wrap, with the same options: `by_class`,
        `by_size`, or one of torch's policies that are functions.
    mixed_precision: torch's `MixedPrecision`. Parameters are cast to its `param_dtype` for the
        forward and backward passes, and the root's inputs; inputs of units with
        `cast_forward_inputs`; gradients to its `reduce_dtype` while they travel; buffers to its
        `buffer_dtype` for good. Batch norms stay as they are, and so do shards and their gradients.
    reshard_after_forward: False keeps the parameters from forward to backward. That saves one of
        two all_gathers, and costs the memory of the whole unit.
    param_init_fn: gives values to the parameters and buffers of a module that are on the device
        "meta", on `minidist.rank.device()`; None calls its `reset_parameters()`. Units come to be
        one by one, so no rank ever holds the whole model.
    prefetch: gather the next unit while one computes.

    As torch's class has them: `sharding_strategy` (SHARD_GRAD_OP is `reshard_after_forward=False`);
    `device_mesh` instead of a process group, of two axes for HYBRID_SHARD: shards along the second,
    which are replicated along the first; `cpu_offload`: shards and their gradients, and so the
    optimizer, are on the CPU; `backward_prefetch`; `device_id`, where the module is; and
    `ignored_modules` or `ignored_states`: modules and parameters that stay as they are on each
    rank, and whose gradients nobody averages. `use_orig_params`, `sync_module_states`,
    `forward_prefetch` and `limit_all_gathers` are what is always done here.

    At construction every rank takes what rank 0 has; for buffers, before each forward pass too.
    Raises ValueError, on every rank, if the ranks have different models or wrap differently, or if
    a parameter would be in two units; RuntimeError without a process group; ValueError or TypeError
    for an argument that makes no sense. `forward` raises RuntimeError for a unit outside of the
    forward pass of its root. `backward` raises autograd's RuntimeError about FullParameters, and
    "an inplace operation", where it comes to a unit by a tensor that was neither in its output nor
    an attribute of its modules, but in a closure: the parameters are freed by then. The parameters
    that there were before raise RuntimeError when an optimizer asks for their gradient.
    """

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
        # The ranks that have a shard each; for hybrid sharding also those that have the same.
        self.groups = groups = _groups(process_group, device_mesh)
        self.process_group, self.mesh = groups[0], device_mesh
        reshards = options.reshards(sharding_strategy, reshard_after_forward, device_mesh)
        offloads = options.offloads(cpu_offload)
        prefetches = options.prefetches(backward_prefetch, prefetch)
        ignored = options.ignored(ignored_modules, ignored_states)
        options.require_known(always)
        precision = self._precision = options.precision(mixed_precision)
        parts = self._parts(auto_wrap_policy, ignored)
        for part in parts.values():
            unit = FullyShardedDataParallel(
                part,
                process_group,
                mixed_precision=mixed_precision,
                reshard_after_forward=reshards,
                param_init_fn=param_init_fn,
                device_mesh=device_mesh,
                cpu_offload=cpu_offload,
                device_id=device_id,
                ignored_states=[*ignored.modules, *ignored.parameters],
            )
            replace(module, part, unit)

        own = build.own_modules(module, ignored.modules)
        device = build.materialize(own, param_init_fn)
        options.require_device(device_id, device)
        for group in groups[::-1]:
            broadcast_state(build.own_tensors(own, ignored.parameters), group)
        home = torch.device("cpu") if offloads else device
        kind = Kind(groups, device, home, precision.param_dtype, precision.reduce_dtype)
        build.cast(own, precision)
        flats = build.flatten(own, kind, ignored, precision.kept)
        self.unit = Unit(flats, [each for _, each in own], reshards)
        self._watch_states()
        inner = [each.unit for each in self.units() if each is not self]
        self._schedule = Schedule([self.unit, *inner], prefetches)
        for each in self.units():
            each._schedule = self._schedule
            each._is_root = each is self
        self._device, self._stale_buffers = device, False

    def _parts(self, policy: Policy | None, ignored: options.Ignored) -> dict[str, nn.Module]:
        """The modules that will be units, by name. All ranks agree on them, or raise."""
        parts, lines, problem = dict[str, nn.Module](), list[str](), None
        try:
            if policy is not None:
                parts = chosen(self.module, policy, ignored.modules)
            lines = list(build.describe(self.module, set(parts.values()), ignored))
        except Exception as error:
            problem = error
        agree.raise_along(self.groups, problem)
        for group in self.groups:
            try:
                require_same_lines(lines, group)
            except ValueError as error:
                problem = error
        agree.pass_on_along(self.groups, problem)
        return parts

    @property
    def unsharded(self) -> list[torch.Tensor]:
        """Where this unit's whole parameters are while they are there, one flat tensor (N S,) for
        each dtype; without memory while they are not."""
        return [flat.whole for flat in self.unit.flats]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's pieces, by the names of the bare module."""
        for name, piece in super().named_parameters("", recurse, remove_duplicate):
            at: Any = self
            words = [prefix] if prefix else []
            for word in name.split("."):
                if not (isinstance(at, Wrapper) and word == "module"):
                    words.append(word)
                at = getattr(at, word)
            yield ".".join(words), piece

    # ---- training --------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own, between gathering its parameters and freeing them."""
        if self.unit.lent:
            return self.module(*inputs, **kwargs)
        schedule, computed_again = self._schedule, in_backward()
        begins = self._is_root and not computed_again
        if begins:
            self._synchronize_buffers()
            schedule.begin()
        elif not (schedule.running or computed_again):
            raise RuntimeError(
                "a unit of FullyShardedDataParallel was called outside of the forward pass of its "
                "root, the outermost wrapper. Call that one"
            )
        try:
            visit = schedule.enter(self.unit)
            casts = self._precision.casts_inputs
            if casts or (begins and self._precision.casts_root_inputs):
                inputs, kwargs = tree_map(self._cast, (inputs, kwargs))
            output = self.module(*inputs, **kwargs)
            schedule.leave(visit, (inputs, kwargs), output)
        except BaseException:
            if begins:
                schedule.abandon()
            raise
        if begins:
            schedule.end()
        return output

    def _cast(self, value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self._precision.param_dtype) if floating else value

    def _synchronize_buffers(self) -> None:
        """A pass that trained has left buffers that differ: rank 0's count."""
        if self._stale_buffers:
            for group in self.groups[::-1]:
                broadcast_state(self.module.buffers(), group)
        self._stale_buffers = torch.is_grad_enabled() and self._schedule.sync

    @property
    def require_backward_grad_sync(self) -> bool:
        """False does what `no_sync` does, until it is True again. Scripts for DDP set it."""
        return self._schedule.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, sync: bool) -> None:
        self._require_root("require_backward_grad_sync").sync = sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do not reduce after the forward passes within the block: their gradients add up on each
        rank, whole. The backward pass of the next forward pass outside reduces the sums. Until
        then the `.grad` of a piece is only this rank's own."""
        schedule = self._require_root("no_sync")
        before, schedule.sync = schedule.sync, False
        try:
            yield
        finally:
            schedule.sync = before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that their norm, that of all shards together, is at most
        `max_norm`. Returns what it was, a number. All ranks must call it.

        torch.nn.utils.clip_grad_norm_ would take the norm of this rank's shards alone, and raises.
        Parameters that are ignored do not count, and are not scaled.
        Raises RuntimeError for gradients of a pass within `no_sync`, which are not reduced yet.
        """
        if any(flat.gradient.kept for flat in self._schedule.flats):
            raise RuntimeError("clip_grad_norm_ before the pass that reduces, after no_sync()")
        slots = (slot for flat in self._schedule.flats for slot in flat.slots)
        pieces = [
            s.piece.own for s in slots if s.piece.own.grad is not None and s.piece.own.numel()
        ]
        shards = [p.grad.as_subclass(torch.Tensor) for p in pieces if p.grad is not None]
        own = get_total_norm(shards, norm_type).to(self._device, torch.float64)
        norm = norm_over_ranks(own, norm_type, self.process_group)
        clip_grads_with_norm_(pieces, max_norm, norm)
        return norm

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for flat in self._schedule.flats:
            if fn(flat.shard) is not flat.shard:
                raise RuntimeError(
                    "shards cannot be moved or converted. Move or convert the module first, and "
                    "wrap it then"
                )
        return super()._apply(fn, recurse)


def _groups(
    process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None
) -> tuple[dist.ProcessGroup, ...]:
    if mesh is not None and process_group is not None:
        raise ValueError("give FullyShardedDataParallel a device_mesh or a process group, not both")
    if mesh is None:
        return (require_group(process_group, "FullyShardedDataParallel"),)
    require_group(None, "FullyShardedDataParallel")
    if mesh.ndim == 1:
        return (mesh.get_group(),)
    if mesh.ndim != 2:
        raise ValueError(f"a mesh of one or two axes is needed, not of {mesh.ndim}")
    return mesh.get_group(1), mesh.get_group(0)
