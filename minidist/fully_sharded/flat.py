"""The parameters of a unit, in one flat tensor of which every rank keeps a shard (lesson 9).

    shard (S,)  --all_gather-->  whole (N S,), that the forward and backward passes read
    shard of the gradient (S,)  <--reduce_scatter--  gradient (N S,)

The whole is there only while it is read. Then its storage is emptied, and filled again when it is
next needed: what autograd has saved are views of this storage, and they see it come back.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist import backend
from minidist.zero.messages import all_gather, reduce_scatter
from minidist.zero.partition import FlatParameters, Piece

Place = tuple[nn.Module, str]  # a module, and what it calls the parameter


@dataclass(frozen=True)
class Kind:
    """How a unit's tensors are kept. `groups`: the ranks that have a shard each; and, for hybrid
    sharding, those that have the same shard. dtypes of None are those of the shard."""

    groups: tuple[dist.ProcessGroup, ...]
    device: torch.device  # that computes
    home: torch.device  # of the shards
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    @property
    def ranks(self) -> int:
        """Over so many the gradients are averaged."""
        return math.prod(map(dist.get_world_size, self.groups))


@dataclass(frozen=True)
class Slot:
    """A parameter of the unit. Several `names` and `places`: it is tied. `piece.whole` tells its
    shape and layout, on the device "meta"; `piece.own` (n,) is what this rank has of it, a view of
    the shard, and what the optimizer trains."""

    names: tuple[str, ...]
    places: tuple[Place, ...]
    piece: Piece
    offset: int  # in the whole


class FlatParameter:
    """Parameters of one dtype, all trained or all frozen, in N shards of one size."""

    def __init__(
        self,
        named: Sequence[tuple[tuple[str, ...], tuple[Place, ...], nn.Parameter]],
        kind: Kind,
    ) -> None:
        group = kind.groups[0]
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        parameters = [parameter for _, _, parameter in named]
        laid = FlatParameters(parameters, group)  # lesson 8: whole, for this moment
        self.kind, self.group, self.rank = kind, group, rank
        self.trained = parameters[0].requires_grad
        # (S,), where ranks share memory in that, and so is the gradient: nothing is staged then.
        self.shard = backend.empty(
            laid.shard, dtype=laid.flat.dtype, device=kind.home, group=group
        ).copy_(laid.flat.chunk(size)[rank])
        self.whole = torch.empty(
            len(laid.flat), dtype=kind.param_dtype or self.shard.dtype, device=kind.device
        )  # (N S,)
        self._used = sum(parameter.numel() for parameter in parameters)
        self.slots = [self._slot(*each, laid.pieces) for each in named]
        self.open: set[Any] = set()  # passes whose backward needs the whole
        self.there = True
        self._arrived: Callable[[], None] | None = None
        self.gradient: torch.Tensor | None = None  # (N S,), not yet reduced
        self.touched: set[int] = set()  # slots with a gradient
        self.lent: torch.Tensor | None = None  # (N S,), by `summon_full_params`
        self.total: torch.Tensor | None = None  # (S,), the mean
        self._end: Callable[[], torch.Tensor] | None = None
        self._notes: list[tuple[torch.Tensor, int, torch.Tensor | None] | None] = []
        self.free()

    def _slot(
        self,
        names: tuple[str, ...],
        places: tuple[Place, ...],
        parameter: nn.Parameter,
        pieces: list[Piece],
    ) -> Slot:
        found = next((piece for piece in pieces if piece.whole is parameter), None)
        span, place = (found.span, found.place) if found else (slice(0, 0), slice(0, 0))
        own = nn.Parameter(self.shard[place], self.trained)
        meta = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta"
        )
        piece = Piece(nn.Parameter(meta, self.trained), span, own, place)
        return Slot(names, places, piece, int(parameter.storage_offset()))

    def views(self, of: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The parameters, as views of the whole, or of another tensor (N S,)."""
        # `.data`, for a version of its own: a whole that comes back has not changed.
        flat = self.whole.data if of is None else of
        return [
            flat.as_strided(slot.piece.whole.shape, slot.piece.whole.stride(), slot.offset)
            for slot in self.slots
        ]

    # ---- the whole -------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to gather the whole, if it is neither there nor on its way."""
        if self.there:
            return
        self.there = True
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        if len(self.whole):
            own = self.shard
            if (own.dtype, own.device) != (self.whole.dtype, self.whole.device):
                own = self._own(self.whole).copy_(own)  # as those that compute want it
            self._arrived = all_gather(self.whole, self.group, own)

    def _own(self, of: torch.Tensor) -> torch.Tensor:
        """The place of this rank's shard in a tensor (N S,)."""
        return of.chunk(dist.get_world_size(self.group))[self.rank]

    def wait(self) -> None:
        """Until the whole is there, if it is on its way."""
        if self._arrived is not None:
            arrived, self._arrived = self._arrived, None
            arrived()

    def free(self) -> None:
        """Give back the memory of the whole."""
        self.wait()
        self.there = False
        self.whole.untyped_storage().resize_(0)

    def gather(self, own: torch.Tensor | None = None) -> torch.Tensor:
        """The shards of all ranks, or what else each has as its `own` (S,), in full precision:
        (N S,), in memory of its own."""
        own = self.shard if own is None else own
        whole = own.new_empty(len(self.whole), device=self.kind.device)
        if len(whole):
            all_gather(whole, self.group, self._own(whole).copy_(own))()
        return whole

    # ---- the gradient ----------------------------------------------------------------------

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Put gradients of the parameters, divided by the number of ranks, into the flat one."""
        scale = 1 / self.kind.ranks
        fresh = self.gradient is None
        if self.gradient is None:
            self.gradient = backend.scratch(
                len(self.whole), dtype=self.shard.dtype, device=self.kind.device, group=self.group
            )
            self.gradient[self._used :] = 0
        for number, (view, g) in enumerate(zip(self.views(self.gradient), gradients, strict=True)):
            if g is None:
                if fresh:
                    view.zero_()
                continue
            if g.layout is not torch.strided:
                raise RuntimeError("a sparse gradient cannot be cut into shards: sparse=True")
            self.touched.add(number)
            if fresh:
                torch.mul(g, scale, out=view)
            else:
                view.add_(g, alpha=scale)

    def reduce(self) -> None:
        """Begin to add up the ranks' gradients. `arrive` waits for it."""
        self.arrive()
        assert self.gradient is not None
        gradient, self.gradient = self.gradient, None
        self._end = reduce_scatter(gradient.to(self.kind.reduce_dtype), self.group)

    def arrive(self) -> None:
        """Wait until this rank's shard of the mean is there, if it is on its way."""
        if self._end is None:
            return
        end, self._end = self._end, None
        mean = end()
        if len(self.kind.groups) > 1:
            dist.all_reduce(mean, group=self.kind.groups[1])
        mean = mean.to(self.shard)
        self.total = mean if self.total is None else self.total.add_(mean)

    def deliver(self, anywhere: list[bool]) -> None:
        """To the `.grad` of each piece whose parameter has a gradient `anywhere`."""
        total, self.total = self.total, None
        self.touched.clear()
        for slot, there in zip(self.slots, anywhere, strict=True):
            own = slot.piece.own
            if total is None or not there or not own.requires_grad:
                continue
            gradient = total[slot.piece.place]
            if own.grad is None:
                own.grad = gradient
            else:
                own.grad += gradient

    # Without synchronization the gradient stays, flat and whole. So that `zero_grad` of any
    # optimizer finds something to forget, each piece has its part of it for a `.grad`.

    def leave(self) -> None:
        """Keep the gradient for a later pass."""
        if self.gradient is None:
            return
        part = self.gradient.chunk(dist.get_world_size(self.group))[self.rank]
        for number, slot in enumerate(self.slots):
            own, before = slot.piece.own, slot.piece.own.grad
            note = None
            if number in self.touched:
                own.grad = part[slot.piece.place].to(own.device, copy=True)
                note = own.grad, own.grad._version, before
            self._notes.append(note)

    def resume(self) -> None:
        """Forget what has been zeroed since; the rest will be added to."""
        if not self._notes:
            return
        assert self.gradient is not None
        notes, self._notes = self._notes, []
        for number, (note, view) in enumerate(zip(notes, self.views(self.gradient), strict=True)):
            if note is None:
                continue
            own, (left, version, before) = self.slots[number].piece.own, note
            if own.grad is left and left._version == version:
                own.grad = before
            else:
                view.zero_()
                self.touched.discard(number)

    def reset(self) -> None:
        """Forget a pass that has failed on its way."""
        self.open.clear()
        self._end = self.gradient = self.total = None
        self._notes = []
        self.touched.clear()
