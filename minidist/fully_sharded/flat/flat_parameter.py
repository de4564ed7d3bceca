"""The parameters of a unit in one flat tensor, of which each rank keeps a shard.

    shard (S,)  --all_gather-->  full (N S,), which the forward and backward passes read

The full tensor has memory only while it is read. Autograd saves views of it for the backward pass;
we empty its storage after the forward pass, and fill the same storage before the backward pass. So
the saved views find their values again. While the storage is empty, its version counter is another
one: autograd then raises instead of reading freed memory. Lesson: fully_sharded
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import MixedPrecision

from minidist import backend
from minidist.distributed_data_parallel.buckets import dense_strides
from minidist.fully_sharded.flat.flat_gradient import FlatGradient
from minidist.fully_sharded.flat.torch_arguments import Options
from minidist.zero.messages import all_gather

Place = tuple[nn.Module, str]  # a module, and what it calls the parameter
Named = tuple[tuple[str, ...], tuple[Place, ...], nn.Parameter]
Arrived = Callable[["FlatParameter", Any], None]
EMPTY = 2**30  # the version of a full tensor without memory


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """One parameter of a unit. It is tied if it has several `names` and `places`."""

    names: tuple[str, ...]
    places: tuple[Place, ...]
    full: torch.Tensor  # its shape and layout, on the device "meta"
    local: nn.Parameter  # what the optimizer trains, a view of the shard: (n,), of a matrix (n, 1)
    span: slice  # of the parameter's elements, in the order of its memory: those in `local`
    in_shard: slice  # where they are in the shard
    offset: int  # of the parameter, in the full tensor


class FlatParameter:
    """Parameters of one dtype, all trained or all frozen, in N shards of one size.

    A cut goes through the middle of a parameter where it has to. So each rank has the N-th part of
    every unit, but for the padding that makes it a multiple of N.
    """

    def __init__(
        self, named: Sequence[Named], options: Options, device: torch.device, precise: bool = False
    ) -> None:
        """`device` computes. `precise`: no dtype but the parameters' own."""
        self.options, self.device = options, device
        self.rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        first = named[0][2]
        self.trained = first.requires_grad
        *offsets, self.used = accumulate((p.numel() for _, _, p in named), initial=0)
        length = -(-self.used // size)  # S
        flat = first.new_empty(length * size, requires_grad=False)
        flat[self.used :] = 0
        for offset, (_, _, p) in zip(offsets, named, strict=True):
            flat.as_strided(p.shape, dense_strides(p), offset).copy_(p.detach())
        home = torch.device("cpu") if options.offloads else device
        self.shard = self._shared(self.own_shard(flat), home)
        precision = MixedPrecision() if precise else options.precision
        self.reduce_dtype = precision.reduce_dtype or flat.dtype
        dtype = (flat.is_floating_point() and precision.param_dtype) or flat.dtype
        self.full = flat.to(device, dtype)  # (N S,)
        # What modules see. It has a version of its own: when the values come back, none changed.
        self._seen, self._version = self.full.data, 0
        self.parameters = [
            self._parameter(*each, offset) for each, offset in zip(named, offsets, strict=True)
        ]
        self.readers: set[Any] = set()  # passes that need the full tensor now
        # Passes whose graph, while there is one, may read it without our knowing.
        self.unseen: WeakSet[Any] = WeakSet()
        self.gathered = self.has_memory = True
        self._arrive: Callable[[], None] | None = None  # waits for an all_gather in flight
        self.gradient = FlatGradient()
        self.summoned: torch.Tensor | None = None  # (N S,), by `summon_full_params`
        self.free()

    def _shared(self, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A copy, in memory that the ranks share if they can: it need not be staged to be sent."""
        return backend.empty(
            len(values), dtype=values.dtype, device=device, group=self.group
        ).copy_(values)

    def _parameter(
        self, names: tuple[str, ...], places: tuple[Place, ...], p: nn.Parameter, offset: int
    ) -> ShardedParameter:
        begin, length = self.rank * len(self.shard), len(self.shard)  # of the shard
        start, stop = (min(max(edge - begin, 0), length) for edge in (offset, offset + p.numel()))
        shift = begin - offset
        full = torch.empty_strided(p.shape, dense_strides(p), dtype=p.dtype, device="meta")
        span, in_shard = slice(start + shift, stop + shift), slice(start, stop)
        # It keeps the number of dimensions, by which some tell weights from biases.
        local = nn.Parameter(self.shard[in_shard].view(-1, *[1] * (p.ndim - 1)), self.trained)
        return ShardedParameter(names, places, full, local, span, in_shard, offset)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that have a shard each."""
        return self.options.groups[0]

    @property
    def trains(self) -> bool:
        """Whether a backward pass is to give it a gradient: all may have been frozen since."""
        return self.trained and any(each.local.requires_grad for each in self.parameters)

    def views(self, of: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The parameters, as views of the full tensor, or of another one (N S,)."""
        flat = self._seen if of is None else of
        return [
            flat.as_strided(each.full.shape, each.full.stride(), each.offset)
            for each in self.parameters
        ]

    def own_shard(self, of: torch.Tensor) -> torch.Tensor:
        """The place of this rank's shard in a tensor (N S,)."""
        return of.chunk(dist.get_world_size(self.group))[self.rank]

    def require_in_place(self) -> None:
        """Raises RuntimeError if a local shard is no longer in the shard that is sent."""
        home = self.shard.untyped_storage().data_ptr()
        for each in self.parameters:
            if each.local.untyped_storage().data_ptr() != home:
                raise RuntimeError(
                    f"the .data of {each.names[0]} has been replaced since it was wrapped, and the "
                    "shard is as it was. Write into it instead, as p.data.copy_() does"
                )

    # ---- gather and free -------------------------------------------------------------------

    def start(self) -> None:
        """Begin the all_gather, unless it has begun or is done."""
        if self.gathered:
            return
        if not self.has_memory:
            self.full.untyped_storage().resize_(self.full.nbytes)
            _set_version(self._seen, self._version)
        self.gathered = self.has_memory = True
        if len(self.full):
            own = self.shard
            if (own.dtype, own.device) != (self.full.dtype, self.full.device):
                own = self.own_shard(self.full).copy_(own)
            self._arrive = all_gather(self.full, self.group, own)

    def wait(self) -> None:
        """Until the all_gather is done, if one is in flight."""
        if self._arrive is not None:
            arrive, self._arrive = self._arrive, None
            arrive()

    def free(self, keep: bool = False) -> None:
        """Give back the memory of the full tensor. `keep` it if somebody may read it whom we do not
        see. It counts as freed all the same: the other ranks will gather it again."""
        self.wait()
        keep = keep or bool(self.unseen)
        self.gathered = False
        if self.has_memory and not keep:
            self._version = self._seen._version
            _set_version(self._seen, EMPTY)
            self.full.untyped_storage().resize_(0)
        self.has_memory = self.has_memory and keep

    def gather(self, own: torch.Tensor | None = None) -> torch.Tensor:
        """The shards of all ranks, or what else each rank has as its `own` (S,), in full precision:
        (N S,), in memory of its own."""
        own = self.shard if own is None else own
        full = own.new_empty(len(self.full), device=self.device)
        if len(full):
            all_gather(full, self.group, self.own_shard(full).copy_(own))()
        return full

    # ---- what the modules see --------------------------------------------------------------

    def show(self, arrived: Arrived) -> None:
        """Wait for the full parameters, and put them where the modules look for them. A backward
        pass that has the gradients of all of them calls `arrived`."""
        self.start()
        self.wait()
        local = [each.local for each in self.parameters]
        if self.trained and torch.is_grad_enabled():
            views: Any = _FullParameters.apply(self, arrived, *local)
        else:
            views = self.views()
        for each, view in zip(self.parameters, views, strict=True):
            for module, name in each.places:
                module.__dict__[name] = view  # Python looks there before it asks nn.Module
                relist(module)

    def hide(self, keep: bool = False) -> None:
        """The opposite: the modules have their local shards, and the full tensor is freed."""
        if self.gathered:
            for each in self.parameters:
                for module, name in each.places:
                    module.__dict__.pop(name, None)
                    if "_flat_weights" in module.__dict__:
                        module._flat_weights = []  # type: ignore[assignment]
        if self.gathered or (self.has_memory and not (keep or self.unseen)):
            self.free(keep)

    def put(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make these the parameters of the modules."""
        for each, parameter in zip(self.parameters, parameters, strict=True):
            for module, name in each.places:
                module._parameters[name] = parameter
                relist(module)

    # ---- copy.deepcopy of a model ----------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """All but what is of the moment."""
        nothing: dict[str, Any] = {
            "full": None,
            "_seen": None,
            "readers": set(),
            "gradient": FlatGradient(),
        }
        return vars(self) | nothing | {"full_dtype": self.full.dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The copies of the local shards are views of the copy of the shard again."""
        dtype, shard = state.pop("full_dtype"), state["shard"]
        vars(self).update(state)
        self.shard = self._shared(shard, shard.device)
        self.full = torch.empty(
            len(shard) * dist.get_world_size(self.group), dtype=dtype, device=self.device
        )
        self._seen, self.has_memory = self.full.data, True
        for each in self.parameters:
            each.local.data = self.shard[each.in_shard].view_as(each.local)
        self.free()


class _FullParameters(torch.autograd.Function):
    """From the local shards of all ranks to full parameters. Forward: an all_gather, which is done
    already. Backward: a reduce_scatter, which begins here and is awaited at the end of the pass. So
    autograd gets no gradients from here."""

    @staticmethod
    def forward(
        ctx: Any, flat: FlatParameter, arrived: Arrived, *_: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.flat, ctx.arrived, ctx.version = flat, arrived, flat.shard._version
        ctx.set_materialize_grads(False)
        return tuple(flat.views())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        if ctx.flat.shard._version != ctx.version:
            raise RuntimeError(
                "parameters have changed since the forward pass to which this backward pass "
                "belongs: backward first, then the optimizer's step"
            )
        ctx.arrived(ctx.flat, gradients)
        return (None,) * (2 + len(gradients))


def relist(module: nn.Module) -> None:
    """nn.LSTM and the like have their parameters in a list as well."""
    if hasattr(module, "_flat_weights_names"):
        names: Any = module._flat_weights_names
        module._flat_weights = [getattr(module, name) for name in names]  # type: ignore[assignment]


def _set_version(tensor: torch.Tensor, version: int) -> None:
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
