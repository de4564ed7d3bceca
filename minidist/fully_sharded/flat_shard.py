"""What is sent of a unit: the rows of its parameters, end to end.

    shard (S,)  --all_gather-->  full parameters, each (N n,)              unshard, wait
    full gradients  --copy-->  (N, S)  --reduce_scatter-->  shard's mean (S,)   reduce, wait

A parameter is a DTensor: each of N ranks has some of its rows. Those of all parameters of a dtype
lie end to end in one tensor, the `shard`, which is sent as a whole. The ranks' rows of a parameter,
end to end, are the parameter. Zhao et al. (arXiv 2304.11277), section 3.2. Lesson: fully_sharded
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from minidist import backend
from minidist.common.dtensor import distributed, relist
from minidist.common.materialize import Named, Place
from minidist.fully_sharded.options import Options
from minidist.zero.shards import all_gather_each, by_rank, reduce_scatter

EMPTY = 2**30  # the version of full parameters without memory
ON_META = (
    "is on the device meta: call to_empty(device=...) of the sharded model, and fill its parameters"
)


@dataclass(eq=False)
class ShardedParameter:
    """One parameter of a unit. It is tied if it has several `names` and `places`."""

    names: tuple[str, ...]
    places: tuple[Place, ...]
    sharded: nn.Parameter  # what the optimizer trains: a DTensor, its rows a view of the shard
    in_shard: slice  # where these are, with the padding of the last ranks
    grad: torch.Tensor | None = None  # of this rank, whole, while a backward pass goes on
    contributes = False  # to a gradient that is not reduced, more than zeros
    mean: torch.Tensor | None = None  # of all ranks, this rank's rows: when it is reduced
    storages: Any = None  # it has these while nobody gives it others

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows."""
        local: torch.Tensor = self.sharded._local_tensor  # type: ignore[attr-defined]
        return local

    def __post_init__(self) -> None:
        self.settle()

    def settle(self) -> None:
        """Remember which memory it has."""
        self.storages = self._storages()

    def problem(self) -> str:
        """Why the modules, or the optimizer, no longer have this parameter, if that is so."""
        if any(m._parameters.get(name) is not self.sharded for m, name in self.places):
            return (
                "has been replaced since it was sharded, and its shards are what is gathered: "
                "write into them, or change the module and then shard it"
            )
        if self.local.is_meta:
            return ON_META
        # p.data = … changes nothing of a DTensor but a storage that nobody reads.
        if any(a._cdata != b._cdata for a, b in zip(self.storages, self._storages(), strict=True)):
            return (
                "has been given other memory, by p.data = ..., or since a module within the unit "
                "was moved alone. Its shard is what is gathered: write into it, p.copy_(...), and "
                "move whole units"
            )
        return ""

    def _storages(self) -> tuple[Any, Any]:
        return self.local.untyped_storage(), self.sharded.untyped_storage()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | dict.fromkeys(("storages", "grad", "mean"))

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

    def set_on_modules(self, parameter: nn.Parameter) -> None:
        """Make this the modules' parameter."""
        for module, name in self.places:
            module._parameters[name] = parameter
        self.to_sharded()


class FlatShard:
    """Parameters of one dtype, as they are sent."""

    def __init__(self, named: Sequence[Named], options: Options, device: torch.device) -> None:
        """`device` computes."""
        self.options, self.device = options, device
        if options.offloads and device.type != "meta":
            self.device = torch.device(options.mesh.device_type)
        self.group = options.groups[0]
        self.ranks, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        sizes = [-(-len(p) // self.ranks) * p.shape[1:].numel() for _, _, p in named]
        dtype = named[0][2].dtype
        home = torch.device("cpu") if options.offloads and device.type != "meta" else device
        self._allocate(sum(sizes), dtype, home)
        self.parameters: list[ShardedParameter] = []
        for (names, places, p), end, size in zip(named, accumulate(sizes), sizes, strict=True):
            in_shard = slice(end - size, end)
            sharded = self._dtensor(p, in_shard)
            self.parameters.append(ShardedParameter(names, places, sharded, in_shard))

    def _allocate(self, length: int, dtype: torch.dtype, home: torch.device) -> None:
        """The shard, in memory that the ranks share if they can; and full parameters, empty."""
        self.shard = backend.empty(length, dtype=dtype, device=home, group=self.group)
        self.shard.zero_()
        low, floats = self.options.precision.param_dtype, dtype.is_floating_point
        # Each parameter (N n,), with padding at its end, one after the other.
        self.full = torch.empty(
            self.ranks * length, dtype=low if low and floats else dtype, device=self.device
        )
        # What modules see: an alias, or a gather would count as a change of what autograd saved.
        self._seen = self.full.data
        self._version = 0
        self._gathering: Callable[[], None] | None = None
        self._reducing: Callable[[], None] | None = None
        self.has_memory = True
        self.free()

    def _dtensor(self, p: nn.Parameter, in_shard: slice) -> nn.Parameter:
        rows = -(-len(p) // self.ranks)
        own = p.detach()[self.rank * rows : (self.rank + 1) * rows]
        local = _part(self.shard, in_shard.start, own.shape).copy_(own)
        return distributed(p, local, self.options.mesh, self.options.placements, p.shape)

    def adopt(self) -> None:
        """Make a shard of what the parameters are now: moved, converted or copied."""
        first = self.parameters[0].local
        self.device = first.device
        if self.options.offloads:
            self.device = torch.device(self.options.mesh.device_type)
        self._allocate(self.parameters[-1].in_shard.stop, first.dtype, first.device)
        for each in self.parameters:
            own = each.local.detach()
            local = _part(self.shard, each.in_shard.start, own.shape).copy_(own)
            each.sharded._local_tensor = local  # type: ignore[attr-defined]
            each.settle()

    # ---- gather and free -------------------------------------------------------------------

    def unshard(self) -> None:
        """Begin the all_gather."""
        if not self.has_memory:
            self.full.untyped_storage().resize_(self.full.nbytes)
        self.has_memory = True
        own = self.shard.to(self.full.device, self.full.dtype)
        places = [
            self.full[self.ranks * each.in_shard.start : self.ranks * each.in_shard.stop]
            for each in self.parameters
        ]
        arrive = all_gather_each(places, self.group, [own[p.in_shard] for p in self.parameters])

        def finish() -> None:
            arrive()
            if own is not self.shard:  # the thread that sent it may hold it a moment longer
                own.untyped_storage().resize_(0)

        self._gathering = finish

    def wait(self) -> None:
        """Until the full parameters are there. Only now they may be read."""
        self._finish_gather()
        if self._seen._version == EMPTY:
            _set_version(self._seen, self._version)

    def _finish_gather(self) -> None:
        if self._gathering is not None:
            arrive, self._gathering = self._gathering, None
            arrive()

    def free(self) -> None:
        """Give back the memory of the full parameters. Autograd raises if it was to read them."""
        self._finish_gather()
        if self.has_memory:
            if self._seen._version != EMPTY:
                self._version = self._seen._version
            _set_version(self._seen, EMPTY)
            self.full.untyped_storage().resize_(0)
            self.has_memory = False

    def views(self) -> list[torch.Tensor]:
        """The full parameters, in the order of `parameters`."""
        return [
            self._seen[self.ranks * each.in_shard.start :][: each.sharded.numel()].view(
                each.sharded.shape
            )
            for each in self.parameters
        ]

    # ---- gradients -------------------------------------------------------------------------

    def reduce(self, scale: float) -> None:
        """Begin to add up the ranks' gradients, times `scale`. A rank that has none adds zeros."""
        self.wait_for_reduce()
        trained = [each for each in self.parameters if each.sharded.requires_grad]
        if not trained:
            return
        sizes = [each.in_shard.stop - each.in_shard.start for each in trained]
        dtype = self.full.dtype
        if dtype.is_floating_point and self.options.precision.reduce_dtype:
            dtype = self.options.precision.reduce_dtype
        full = backend.scratch(
            self.ranks * sum(sizes), dtype=dtype, device=self.device, group=self.group
        )
        for each, place in zip(trained, full.view(self.ranks, -1).split(sizes, 1), strict=True):
            partial = partial_of(each.sharded)  # by passes that did not reduce: scaled already
            given = [(g, by) for g, by in ((each.grad, scale), (partial, 1)) if g is not None]
            if not given or place.numel() > each.sharded.numel():
                place.zero_()
            for number, (whole, by) in enumerate(given):
                for part, source in by_rank(place, whole.to(full)):
                    if number == 0:
                        torch.mul(source, by, out=part)
                    else:
                        part.add_(source, alpha=by)
            each.grad = None
            if partial is not None:
                each.sharded.grad = None
        arrive = reduce_scatter(full, self.group)
        self._reducing = lambda: self._receive(arrive(), trained, sizes)

    def _receive(
        self, mean: torch.Tensor, trained: list[ShardedParameter], sizes: list[int]
    ) -> None:
        for replicas in self.options.groups[1:]:
            dist.all_reduce(mean, group=replicas)
        mean = mean.to(self.shard)
        for each, begin in zip(trained, accumulate(sizes, initial=0), strict=False):
            own = mean[begin : begin + each.local.numel()].view(each.local.shape)
            each.mean = own if each.mean is None else each.mean.add_(own)

    def wait_for_reduce(self) -> None:
        """Until this rank's rows of the mean are there."""
        if self._reducing is not None:
            receive, self._reducing = self._reducing, None
            receive()

    # ---- copy.deepcopy of a model ----------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        nothing = "shard", "full", "_seen", "_gathering", "_reducing"
        return vars(self) | dict.fromkeys(nothing)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.adopt()


def rows_of(whole: torch.Tensor, sharded: torch.Tensor) -> DTensor:
    """This rank's rows of a tensor like the parameter, the same on every rank. No message."""
    like: Any = sharded
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def partial_of(parameter: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of a gradient that no pass has reduced, whole, times 1 / ranks."""
    grad: Any = parameter.grad
    return grad._local_tensor if grad is not None and grad.placements[-1].is_partial() else None


def _part(flat: torch.Tensor, begin: int, shape: torch.Size) -> torch.Tensor:
    """A view of these elements that begins its storage: copy.deepcopy of a DTensor needs that."""
    part = flat[begin : begin + shape.numel()].view(shape)
    if flat.is_meta:
        return part
    first = part.storage_offset() * part.element_size()
    storage: Any = flat.untyped_storage()[first : first + part.nbytes]
    return flat.new_empty(0).set_(storage, 0, part.shape, part.stride())


def _set_version(tensor: torch.Tensor, version: int) -> None:
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
