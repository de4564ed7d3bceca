"""The parameters of a unit, in one flat tensor of which every rank keeps a shard (lesson 9).

    shard (S,)  --all_gather-->  whole (N S,), that the forward and backward passes read

The whole is there only while it is read. Then its storage is emptied, and filled again when it is
next needed: what autograd has saved are views of this storage, and they see it come back. While it
is empty, their version is another one. So autograd raises where it would read what is not there.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist import backend
from minidist.fully_sharded.gradient import FlatGradient
from minidist.zero.messages import all_gather
from minidist.zero.partition import FlatParameters, Piece

Place = tuple[nn.Module, str]  # a module, and what it calls the parameter
EMPTY = 2**30  # the version of a whole that is not there


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
    shape and layout, on the device "meta"; `piece.own` is what this rank has of it, a view of the
    shard, and what the optimizer trains: (n,), of a matrix (n, 1), and so on."""

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
            len(laid.flat),
            dtype=(self.shard.is_floating_point() and kind.param_dtype) or self.shard.dtype,
            device=kind.device,
        )  # (N S,)
        # What modules see. It has a version of its own: a whole that comes back has not changed.
        self._seen, self._version = self.whole.data, 0
        self.used = sum(parameter.numel() for parameter in parameters)  # without padding
        self.slots = [self._slot(*each, laid.pieces) for each in named]
        self.open: set[Any] = set()  # passes that need the whole now
        self.there = self.kept = True
        self._arrived: Callable[[], None] | None = None
        self.gradient = FlatGradient()
        self.lent: torch.Tensor | None = None  # (N S,), by `summon_full_params`
        self.free()

    @property
    def trains(self) -> bool:
        """Whether a backward pass is to give it a gradient: all may have been frozen since."""
        return self.trained and any(slot.piece.own.requires_grad for slot in self.slots)

    def _slot(
        self,
        names: tuple[str, ...],
        places: tuple[Place, ...],
        parameter: nn.Parameter,
        pieces: list[Piece],
    ) -> Slot:
        found = next((piece for piece in pieces if piece.whole is parameter), None)
        span, place = (found.span, found.place) if found else (slice(0, 0), slice(0, 0))
        own = self._piece(place, parameter.ndim, self.trained)
        meta = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta"
        )
        piece = Piece(nn.Parameter(meta, self.trained), span, own, place)
        return Slot(names, places, piece, int(parameter.storage_offset()))

    def _piece(self, place: slice, ndim: int, trained: bool) -> nn.Parameter:
        """It keeps the parameter's number of dimensions, by which some tell weights from biases."""
        return nn.Parameter(self.shard[place].view(-1, *[1] * (ndim - 1)), trained)

    def views(self, of: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The parameters, as views of the whole, or of another tensor (N S,)."""
        flat = self._seen if of is None else of
        return [
            flat.as_strided(slot.piece.whole.shape, slot.piece.whole.stride(), slot.offset)
            for slot in self.slots
        ]

    # ---- the whole -------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to gather the whole, if it is neither there nor on its way."""
        if self.there:
            return
        if not self.kept:
            self.whole.untyped_storage().resize_(self.whole.nbytes)
            _set_version(self._seen, self._version)
        self.there = self.kept = True
        if len(self.whole):
            own = self.shard
            if (own.dtype, own.device) != (self.whole.dtype, self.whole.device):
                own = self.own_shard(self.whole).copy_(own)  # as those that compute want it
            self._arrived = all_gather(self.whole, self.group, own)

    def own_shard(self, of: torch.Tensor) -> torch.Tensor:
        """The place of this rank's shard in a tensor (N S,)."""
        return of.chunk(dist.get_world_size(self.group))[self.rank]

    def wait(self) -> None:
        """Until the whole is there, if it is on its way."""
        if self._arrived is not None:
            arrived, self._arrived = self._arrived, None
            arrived()

    def free(self, keep: bool = False) -> None:
        """The whole is not needed. Give back its memory, unless somebody may read it, unseen by us:
        then `keep` it. It is gathered again all the same, as on the other ranks."""
        self.wait()
        self.there = False
        if self.kept and not keep:
            self._version = self._seen._version
            _set_version(self._seen, EMPTY)
            self.whole.untyped_storage().resize_(0)
        self.kept = self.kept and keep

    def gather(self, own: torch.Tensor | None = None) -> torch.Tensor:
        """The shards of all ranks, or what else each has as its `own` (S,), in full precision:
        (N S,), in memory of its own."""
        own = self.shard if own is None else own
        whole = own.new_empty(len(self.whole), device=self.kind.device)
        if len(whole):
            all_gather(whole, self.group, self.own_shard(whole).copy_(own))()
        return whole

    # ---- copy.deepcopy of a wrapper --------------------------------------------------------

    def copied(self, memo: dict[int, Any]) -> "FlatParameter":
        """One with shards of its own, of the same modules as yet, and its pieces in the memo."""
        new = memo[id(self)] = copy.copy(self)
        new.shard = backend.empty(
            len(self.shard), dtype=self.shard.dtype, device=self.shard.device, group=self.group
        ).copy_(self.shard)
        new.whole = torch.empty_like(self.whole)
        new._seen, new.there, new.kept = new.whole.data, True, True
        new.open, new.gradient = set(), FlatGradient()
        new.slots = []
        for slot in self.slots:
            whole, old = slot.piece.whole, slot.piece.own
            own = new._piece(slot.piece.place, whole.ndim, old.requires_grad)
            new.slots.append(replace(slot, piece=replace(slot.piece, own=own)))
            memo[id(old)] = own
        new.free()
        return new

    def move(self, memo: dict[int, Any]) -> None:
        """To the copies of its modules."""
        self.slots = [
            replace(slot, places=tuple((memo[id(module)], name) for module, name in slot.places))
            for slot in self.slots
        ]


def _set_version(tensor: torch.Tensor, version: int) -> None:
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
