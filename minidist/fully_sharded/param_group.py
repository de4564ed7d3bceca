"""The parameters of a unit: they are gathered, used and freed together.

    shard (S,)  --all_gather-->  full parameters, each (N n,)            unshard, wait_for_unshard
    full gradients  --copy-->  (N, S)  --reduce_scatter-->  mean (S,)    reduce, wait_for_reduce

A parameter is a DTensor: each of N ranks has some of its rows. Those of all parameters lie end to
end in one tensor, the `shard`, which is sent as a whole. The ranks' rows of a parameter, end to
end, are the parameter. Zhao et al. (arXiv 2304.11277), section 3.2. Lesson: fully_sharded
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor

from minidist.common.dtensor import distributed, of_local, relist
from minidist.common.materialize import Named, Place
from minidist.machine import backend
from minidist.zero.shards import Cut, all_gather_each, deal, reduce_scatter

EMPTY = 2**30  # the version of full parameters without memory


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

    @property
    def placements(self) -> list[Placement]:
        """Of every parameter."""
        return [Replicate()] * (self.mesh.ndim - 1) + [Shard(0)]


@dataclass(eq=False)
class ShardedParameter:
    """One parameter of a unit. It is tied if it has several `names` and `places`."""

    names: tuple[str, ...]
    places: tuple[Place, ...]
    sharded: Any  # what the optimizer trains: a DTensor, its rows a view of the shard
    in_shard: slice  # where these are, with the padding of the last ranks
    grad: torch.Tensor | None = None  # of this rank, whole, while a backward pass goes on
    mean: torch.Tensor | None = None  # of all ranks, this rank's rows: when it is reduced
    touched: bool = False  # this rank has given a gradient to what is reduced in this pass

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows."""
        local: torch.Tensor = self.sharded._local_tensor
        return local

    @property
    def left(self) -> torch.Tensor | None:
        """This rank's part of a gradient that no pass has reduced, whole, times 1 / ranks."""
        grad = self.sharded.grad
        return grad._local_tensor if grad is not None and grad.placements[-1].is_partial() else None

    def to_unsharded(self, view: torch.Tensor) -> None:
        """Have the modules compute with this. Python looks there before it asks nn.Module: so
        `parameters()` stays as it is."""
        for module, name in self.places:
            module.__dict__[name] = view
            relist(module)

    def to_sharded(self) -> None:
        """Have them compute with the DTensor again."""
        for module, name in self.places:
            module.__dict__.pop(name, None)
            relist(module)

    def set_on_modules(self, parameter: Any) -> None:
        """Make this the modules' parameter."""
        for module, name in self.places:
            module._parameters[name] = parameter
        self.to_sharded()

    def rows_of(self, whole: torch.Tensor) -> Any:
        """Of a tensor that is the same on every rank, a DTensor of this rank's rows. No message."""
        mesh, placements = self.sharded.device_mesh, self.sharded.placements
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)


Gradients = list[tuple[ShardedParameter, torch.Tensor | None]]


class ParamGroup:
    """The parameters of `modules`: of `module`, and of all within it that are in no inner unit."""

    def __init__(
        self,
        module: nn.Module,
        modules: Sequence[nn.Module],
        named: Sequence[Named],
        options: Options,
    ) -> None:
        self.module: Any = module
        self.modules, self.options, self.group = modules, options, options.groups[0]
        self.cut = Cut(self.group)  # which rows are this rank's
        self.ranks = math.prod(map(dist.get_world_size, options.groups))
        self.syncs = self.prefetches = True
        self.prefix = ""  # of its names, in the root
        self.unsharded = False  # gathered, or on the way
        self.readers = set[Any]()  # passes that need the full parameters now
        self.has_left = False  # a pass has left gradients that are not reduced
        self.before: Any = None  # the pass that came before this unit's last one
        sizes = [self.cut.rows(p) * p.shape[1:].numel() for _, _, p in named]
        like = named[0][2] if named else torch.empty(0)
        self._allocate(sum(sizes), like.dtype, like.device)
        self.parameters: list[ShardedParameter] = []
        for (names, places, p), end, size in zip(named, accumulate(sizes), sizes, strict=True):
            own = self.cut.own(p.detach())
            local = self._rows(end - size, own.shape).copy_(own)
            sharded = distributed(p, local, options.mesh, options.placements, p.shape)
            each = ShardedParameter(names, places, sharded, slice(end - size, end))
            each.set_on_modules(sharded)
            self.parameters.append(each)

    def _allocate(self, length: int, dtype: torch.dtype, home: torch.device) -> None:
        """The shard, in memory that the ranks share if they can; and full parameters, empty."""
        self.device = home
        if self.options.offloads and home.type != "meta":
            self.device, home = torch.device(self.options.mesh.device_type), torch.device("cpu")
        self.shard = backend.empty(length, dtype=dtype, device=home, group=self.group)
        self.shard.zero_()
        low = self.options.precision.param_dtype if dtype.is_floating_point else None
        # Each parameter (N n,), with padding at its end, one after the other.
        self.full = torch.empty(self.cut.ranks * length, dtype=low or dtype, device=self.device)
        # What modules see: an alias, or a gather would count as a change of what autograd saved.
        self._seen, self._version = self.full.data, 0
        self._gathering: Callable[[], None] | None = None
        self._reducing: Callable[[], None] | None = None
        self.free()

    def _rows(self, begin: int, shape: torch.Size) -> torch.Tensor:
        """A view of the shard that begins its storage: copy.deepcopy of a DTensor needs that."""
        part = self.shard[begin : begin + shape.numel()].view(shape)
        if part.is_meta:
            return part
        first = part.storage_offset() * part.element_size()
        storage: Any = self.shard.untyped_storage()[first : first + part.nbytes]
        return self.shard.new_empty(0).set_(storage, 0, part.shape, part.stride())

    def adopt(self) -> None:
        """Go on with the parameters that the modules have now: they were moved or converted."""
        for each in self.parameters:
            owner, name = each.places[0]
            each.sharded = owner._parameters[name]
            each.set_on_modules(each.sharded)
        own = [each.local.detach() for each in self.parameters]
        length, like = (self.parameters[-1].in_shard.stop, own[0]) if own else (0, torch.empty(0))
        self._allocate(length, like.dtype, like.device)
        for each, local in zip(self.parameters, own, strict=True):
            rows = self._rows(each.in_shard.start, local.shape)
            each.sharded._local_tensor = rows.copy_(local)

    @property
    def name(self) -> str:
        """In the root; of the root itself, its class."""
        return self.prefix.rstrip(".") or type(self.module).__name__.removeprefix("FSDP")

    @property
    def trained(self) -> list[ShardedParameter]:
        """Those to which a backward pass is to give a gradient."""
        return [each for each in self.parameters if each.sharded.requires_grad]

    @property
    def version(self) -> int:
        """Changes when a parameter is written, or its local tensor."""
        return sum(each.sharded._version + each.local._version for each in self.parameters)

    # ---- gather, use, free -----------------------------------------------------------------

    def unshard(self) -> None:
        """Begin the all_gather, unless it has begun."""
        if self.unsharded:
            return
        self.unsharded = True
        self.full.untyped_storage().resize_(self.full.nbytes)
        own = self.shard.to(self.full.device, self.full.dtype)
        shards = [own[each.in_shard] for each in self.parameters]
        places = self.full.split([self.cut.ranks * len(shard) for shard in shards])
        if shards:
            with backend.purpose(self.group, f"unit {self.name}"):
                self._gathering = all_gather_each(places, self.group, shards)

    def wait_for_unshard(self, on_gradients: Callable[[Gradients], None]) -> None:
        """Give the modules full parameters. Autograd calls `on_gradients` when it has the gradients
        of all."""
        self.unshard()
        self._finish_gather()
        if self._seen._version == EMPTY:
            _set_version(self._seen, self._version)
        views = {
            each: self._seen[self.cut.ranks * each.in_shard.start :][: each.sharded.numel()].view(
                each.sharded.shape
            )
            for each in self.parameters
        }
        ours = self.trained
        if ours and torch.is_grad_enabled():
            anchor = torch.empty(0, device=self.device, requires_grad=True)
            full = _Unshard.apply(
                anchor,
                self,
                lambda gradients: on_gradients(list(zip(ours, gradients, strict=True))),
                [views[each] for each in ours],
            )
            views |= zip(ours, full, strict=True)
        for each, view in views.items():
            each.to_unsharded(view)

    def _finish_gather(self) -> None:
        if self._gathering is not None:
            arrive, self._gathering = self._gathering, None
            arrive()

    def to_sharded(self) -> None:
        """The modules have their DTensors again."""
        for each in self.parameters:
            each.to_sharded()

    def reshard(self) -> None:
        """The modules have their DTensors again, and the full parameters are freed, unless a pass
        reads them."""
        if not self.readers:
            self.to_sharded()
            self.free()

    def free(self) -> None:
        """Give back the memory of the full parameters. Autograd raises if it was to read them."""
        self.unsharded = False
        self._finish_gather()
        if self._seen._version != EMPTY:
            self._version = self._seen._version
            _set_version(self._seen, EMPTY)
        self.full.untyped_storage().resize_(0)

    # ---- gradients -------------------------------------------------------------------------

    def add(self, gradients: Gradients) -> None:
        """Add what a backward pass has made."""
        for each, gradient in gradients:
            if gradient is None or not each.sharded.requires_grad:  # frozen since
                continue
            if gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"the gradient of {self.prefix}{each.names[0]} is sparse, and cannot be cut "
                    "into rows: sparse=False"
                )
            each.grad = gradient if each.grad is None else each.grad + gradient

    def reduce(self) -> None:
        """Begin to make the mean of the ranks' gradients. A rank that has none adds zeros."""
        self.has_left, trained = False, self.trained
        sizes = [each.in_shard.stop - each.in_shard.start for each in trained]
        dtype = self.full.dtype
        if dtype.is_floating_point and self.options.precision.reduce_dtype:
            dtype = self.options.precision.reduce_dtype
        full = backend.scratch(
            self.cut.ranks * sum(sizes), dtype=dtype, device=self.device, group=self.group
        )
        for each, place in zip(trained, full.view(self.cut.ranks, -1).split(sizes, 1), strict=True):
            if (left := each.left) is not None:
                whole = left.mul_(self.ranks)
                each.grad = whole if each.grad is None else whole.add_(each.grad.to(whole))
                each.sharded.grad = None
            if each.grad is None:
                place.zero_()
            else:
                deal(place, each.grad.to(full), 1 / self.ranks)
                each.grad, each.touched = None, True
        with backend.purpose(self.group, f"unit {self.name}"):
            arrive = reduce_scatter(full, self.group)

        def receive() -> None:
            mean = arrive()
            for replicas in self.options.groups[1:]:
                dist.all_reduce(mean, group=replicas)
            mean = mean.to(self.shard)
            for each, begin in zip(trained, accumulate(sizes, initial=0), strict=False):
                own = mean[begin : begin + each.local.numel()].view(each.local.shape)
                if each.sharded.grad is not None:
                    each.sharded.grad._local_tensor.add_(own)  # of earlier passes
                else:
                    each.mean = own if each.mean is None else each.mean.add_(own)

        self._reducing = receive

    def wait_for_reduce(self) -> None:
        """Until this rank's rows of the mean are there."""
        if self._reducing is not None:
            receive, self._reducing = self._reducing, None
            receive()

    def leave(self) -> None:
        """Without reducing: the `.grad` of a parameter is the sum of what the ranks have, which
        DTensor calls Partial, and each rank has its own part of it, whole."""
        self.has_left, mesh = True, self.options.mesh
        for each in self.trained:
            gradient, each.grad = each.grad, None
            own, before = each.left, each.sharded.grad
            if own is None and before is not None:  # the mean of all: each rank adds its rows of it
                own = each.local.new_zeros(each.sharded.shape)
                self.cut.own(own).copy_(before._local_tensor * (self.cut.ranks / self.ranks))
            if gradient is not None:
                gradient = (gradient / self.ranks).to(each.local.device, each.local.dtype)
                own = gradient if own is None else own.add_(gradient)
            if own is not None:
                each.sharded.grad = of_local(own, mesh, [Partial()] * mesh.ndim, own.shape)

    def forget(self) -> None:
        """A backward pass has failed."""
        self._reducing = None
        for each in self.parameters:
            each.grad, each.mean, each.touched = None, None, False


def deliver(each: ShardedParameter, anywhere: bool) -> None:
    """The mean becomes the `.grad` of a parameter that has a gradient on any rank, and hooks are
    called as autograd does."""
    mean, each.mean, each.touched = each.mean, None, False
    if not anywhere:
        return
    parameter = each.sharded
    if parameter._backward_hooks:
        takes = "register_post_accumulate_grad_hook"
        raise RuntimeError(f"a sharded parameter calls no register_hook: use {takes}")
    if mean is not None:  # else that of earlier passes has taken it
        mesh, placements = parameter.device_mesh, parameter.placements
        gradient: Any = of_local(each.local, mesh, placements, parameter.shape)
        gradient._local_tensor = mean  # not at once: copy.deepcopy fails for a view with an offset
        parameter.grad = gradient
    for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)


class _Unshard(torch.autograd.Function):
    """From DTensors to full parameters. Forward: an all_gather, which is done already. Backward: a
    reduce_scatter, which begins here and is awaited at the end of the pass. So autograd gets no
    gradients from here; and it needs a tensor to begin from, the empty `anchor`."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        group: ParamGroup,
        on_gradients: Any,
        full: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.on_gradients, ctx.version = group, on_gradients, group.version
        ctx.set_materialize_grads(False)
        return tuple(full)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        if ctx.group.version != ctx.version:
            raise RuntimeError(
                "parameters have changed since the forward pass to which this backward pass "
                "belongs: backward first, then the optimizer's step"
            )
        ctx.on_gradients(gradients)
        return None, None, None, None


def _set_version(tensor: torch.Tensor, version: int) -> None:
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
