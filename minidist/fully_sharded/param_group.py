"""The parameters of a unit: they are gathered, used and freed together.

    unshard, wait_for_unshard  ->  the modules compute with full parameters  ->  reshard
    add (a backward pass's gradients)  ->  reduce, wait_for_reduce  ->  deliver

Zhao et al. (arXiv 2304.11277), section 3.2. Lesson: fully_sharded
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial

from minidist import backend
from minidist.fully_sharded.flat_shard import FlatShard, ShardedParameter, partial_of
from minidist.fully_sharded.options import Options

Gradients = list[tuple[ShardedParameter, torch.Tensor | None]]


class ParamGroup:
    """The parameters of `modules`: of `module`, and of all within it that are in no inner unit."""

    def __init__(
        self, module: nn.Module, modules: Sequence[nn.Module], flats: list[FlatShard], opts: Options
    ) -> None:
        self.module: Any = module
        self.modules, self.flats, self.options = modules, flats, opts
        self.reshards = opts.reshards  # after forward
        self.casts_inputs = opts.precision.cast_forward_inputs
        self.reshards_after_backward = self.syncs = True
        self.divisor: float = math.prod(map(dist.get_world_size, opts.groups))
        self.prefix = ""  # of its names, in the root
        self.unsharded = False  # gathered, or on the way
        self.readers = set[Any]()  # passes that need the full parameters now
        self.pinned = False  # by `unshard()`, until its forward pass or `reshard()`
        self.summoned = False  # its modules have copies of the full parameters
        self.gathered_version = -1
        self.has_partial = False  # a pass has left gradients that are not reduced
        self.next_forward: list[ParamGroup] | None = None  # to gather meanwhile, as the user says
        self.next_backward: list[ParamGroup] | None = None
        self.before: Any = None  # the pass that came before this unit's last one

    @property
    def parameters(self) -> Iterator[ShardedParameter]:
        """All of them."""
        return (each for flat in self.flats for each in flat.parameters)

    @property
    def name(self) -> str:
        """In the root; of the root itself, its class."""
        return self.prefix.rstrip(".") or type(self.module).__name__.removeprefix("FSDP")

    @property
    def trains(self) -> bool:
        """Whether a backward pass is to give it a gradient."""
        return any(each.sharded.requires_grad for each in self.parameters)

    @property
    def version(self) -> int:
        """Changes when a parameter is written, or its local tensor."""
        return sum(each.sharded._version + each.local._version for each in self.parameters)

    # ---- gather, use, free -----------------------------------------------------------------

    def unshard(self) -> None:
        """Begin to gather the full parameters, unless that has begun."""
        if self.unsharded:
            return
        for each in self.parameters:
            if problem := each.problem():
                raise RuntimeError(f"parameter {self.prefix}{each.names[0]} {problem}")
        self.unsharded, self.gathered_version = True, self.version
        with backend.purpose(self.options.groups[0], f"unit {self.name}"):
            for flat in self.flats:
                flat.unshard()

    def wait_for_unshard(self, on_gradients: Callable[[Gradients], None] | None = None) -> None:
        """Give the modules full parameters. Autograd calls `on_gradients` when it has the gradients
        of all."""
        self.unshard()
        for flat in self.flats:
            flat.wait()
        views = [view for flat in self.flats for view in flat.views()]
        parameters = list(self.parameters)
        trained = [i for i, each in enumerate(parameters) if each.sharded.requires_grad]
        if trained and on_gradients is not None and torch.is_grad_enabled():
            ours = [parameters[i] for i in trained]
            anchor = torch.empty(0, device=views[0].device, requires_grad=True)
            full = _Unshard.apply(
                anchor,
                self,
                lambda gradients: on_gradients(list(zip(ours, gradients, strict=True))),
                [views[i] for i in trained],
            )
            for number, view in zip(trained, full, strict=True):
                views[number] = view
        for each, view in zip(parameters, views, strict=True):
            each.to_unsharded(view)

    def pin(self) -> None:
        """Make the full parameters the modules' own, until the next forward pass or `reshard`."""
        self.wait_for_unshard()
        self.pinned = True
        for each in self.parameters:
            module, name = each.places[0]
            each.set_on_modules(nn.Parameter(module.__dict__[name], each.sharded.requires_grad))

    def to_sharded(self) -> None:
        """The modules have their DTensors again."""
        for each in self.parameters:
            each.set_on_modules(each.sharded) if self.pinned else each.to_sharded()
        self.pinned = False

    def reshard(self, keep: bool = False) -> None:
        """The modules have their DTensors again, and the full parameters are freed, unless a pass
        reads them; `keep` their memory if an output that we did not find may use it. The next pass
        gathers them anyway."""
        if self.readers:
            return
        self.to_sharded()
        self.unsharded = False
        if not keep:
            for flat in self.flats:
                flat.free()

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether one of these is, in part, a view of the full parameters."""
        # Not by address: on "meta" all storages have the same one.
        ours = {flat.full.untyped_storage()._cdata for flat in self.flats}
        return any(
            t.layout is torch.strided and not isinstance(t, DTensor)
            and t.untyped_storage()._cdata in ours
            for t in tensors
        )  # fmt: skip

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

    def has_gradients(self) -> list[bool]:
        """Of each trained parameter, whether this rank has a gradient that is not reduced."""
        return [
            each.grad is not None or (partial_of(each.sharded) is not None and each.contributes)
            for each in self.parameters
            if each.sharded.requires_grad
        ]

    def reduce(self) -> None:
        """Begin to make the mean of the ranks' gradients."""
        self.has_partial = False
        with backend.purpose(self.options.groups[0], f"unit {self.name}"):
            for flat in self.flats:
                flat.reduce(1 / self.divisor)

    def wait_for_reduce(self) -> None:
        """Until it is there."""
        for flat in self.flats:
            flat.wait_for_reduce()

    def deliver(self, anywhere: Iterator[bool]) -> None:
        """The mean becomes the `.grad` of each parameter that has a gradient on any rank. Hooks of
        the parameter are called, as autograd does."""
        for each in self.parameters:
            mean, each.mean = each.mean, None
            if each.sharded.requires_grad and next(anywhere) and mean is not None:
                _accumulate(each.sharded, mean)

    def leave(self) -> None:
        """Without reducing: the `.grad` of each parameter is the sum of what the ranks have, which
        DTensor calls Partial, and each rank has its own part of it, whole. Zeros, if it has none:
        the others may have one, and what is done with a DTensor is done by all ranks."""
        self.has_partial, mesh = True, self.options.mesh
        for each in self.parameters:
            gradient, each.grad = each.grad, None
            if not each.sharded.requires_grad:
                continue
            before: Any = each.sharded.grad
            own = partial_of(each.sharded)
            # A mean counts on all ranks; of a sum this rank may have nothing but zeros.
            there = before is not None and (own is None or each.contributes)
            each.contributes = there or gradient is not None
            if own is None:
                own = each.local.new_zeros(each.sharded.shape)
                if before is not None:  # each rank adds its rows of the mean
                    local = before._local_tensor
                    begin = self.flats[0].rank * -(-len(before) // self.flats[0].ranks)
                    own[begin : begin + len(local)] += local * self.flats[0].ranks / mesh.size()
                each.sharded.grad = DTensor.from_local(
                    own, mesh, [Partial()] * mesh.ndim, run_check=False
                )
            if gradient is not None:
                own += (gradient / self.divisor).to(own)  # shards may be on another device

    def adopt(self) -> None:
        """Go on with the parameters that the modules have now: moved or converted ones."""
        for each in self.parameters:
            module, name = each.places[0]
            each.sharded = module._parameters[name]  # type: ignore[assignment]
            each.set_on_modules(each.sharded)
        for flat in self.flats:
            flat.adopt()
        self.gathered_version = -1

    def forget(self) -> None:
        """A backward pass has failed."""
        for each in self.parameters:
            each.grad = each.mean = None
        for flat in self.flats:
            flat._reducing = None

    def __getstate__(self) -> dict[str, Any]:
        # What to gather ahead are units of the model that is copied: the copy finds its own.
        ahead = {name: vars(self)[name] and None for name in ("next_forward", "next_backward")}
        return vars(self) | {"readers": set(), "before": None} | ahead


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


def _accumulate(parameter: nn.Parameter, mean: torch.Tensor) -> None:
    like: Any = parameter
    gradient: Any = DTensor(like._local_tensor, like._spec, requires_grad=False)
    gradient._local_tensor = mean  # not at once: copy.deepcopy fails for a view with an offset
    for hook in list((parameter._backward_hooks or {}).values()):  # one may remove itself
        replaced = hook(gradient)
        gradient = gradient if replaced is None else replaced
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    for hook in list((like._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)
