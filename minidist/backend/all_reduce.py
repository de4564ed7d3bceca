"""all_reduce and reduce, on memory that all ranks share."""

from collections.abc import Iterator, Sequence

import torch

from minidist.backend.members import Members
from minidist.backend.queues import Operation
from minidist.backend.reduction import Reduction
from minidist.backend.staging import cached, pieces_of, share_of, show

SMALL = 1 << 15  # bytes up to which every rank adds up everything: it costs less than a barrier


class Piece:
    """A piece of an all_reduce: `part` (n,) of this rank's tensor, and each rank's room for it."""

    def __init__(self, members: Members, part: torch.Tensor, rooms: list[torch.Tensor]) -> None:
        self.rank, self.part, self.rooms = members.rank, part, rooms
        self.shares = [share_of(len(part), rank, members.size) for rank in range(members.size)]

    def others(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """The share of each other rank, and that rank's room."""
        for rank, (share, room) in enumerate(zip(self.shares, self.rooms, strict=True)):
            if rank != self.rank:
                yield share, room

    def stage(self) -> None:
        """Show what the others add up. This rank's own share need not be seen."""
        room = self.rooms[self.rank]
        for share, _ in self.others():
            room[share].copy_(self.part[share])

    def add_up(self, reduction: Reduction, received: bool) -> None:
        """This rank's share, in its place if that is wanted here, and for all to see."""
        mine = self.shares[self.rank]
        room, part = self.rooms[self.rank][mine], self.part[mine]
        total = part if received else room
        reduction.into(total, part, [room[mine] for _, room in self.others()])
        if received:
            room.copy_(total)

    def take(self) -> None:
        """What the others have added up."""
        for share, room in self.others():
            self.part[share].copy_(room[share])


def all_reduce(
    members: Members, x: torch.Tensor, reduction: Reduction, receivers: Sequence[int]
) -> Operation:
    """x: (n,), in the end the total on the receivers. Rank r adds up the r-th part of each piece.

    Between two barriers a rank takes one piece, adds up the next and stages the one after that: so
    a piece costs one barrier.
    """
    received = members.rank in receivers
    if x.nbytes <= SMALL:
        yield from _all_reduce_small(members, x, reduction, received)
        return
    pieces = (Piece(members, x[cut], rooms) for cut, rooms in pieces_of(members, len(x), x.dtype))
    first = next(pieces)
    if there := (yield from show(members, x, range(members.size), first.stage)):
        yield from _all_reduce_in_place(members, there, reduction)
        return
    taken: Piece | None = None
    added: Piece | None = first
    while taken or added:
        if taken and received:
            taken.take()
        taken = added
        if added:
            added.add_up(reduction, received)
            if staged := next(pieces, None):
                staged.stage()
            yield from members.barrier()
            added = staged


def _all_reduce_small(
    members: Members, x: torch.Tensor, reduction: Reduction, received: bool
) -> Operation:
    """Every rank adds up all of it, in the order of ranks: so all have the same bits."""
    rooms = members.rooms(len(x), x.dtype)
    rooms[members.rank].copy_(x)
    yield from members.agree()
    if received:
        reduction.into(x, rooms[0], rooms[1:])


def _all_reduce_in_place(
    members: Members, xs: Sequence[torch.Tensor], reduction: Reduction
) -> Operation:
    """Rank r adds up the r-th part of all ranks' tensors, and writes it into all of them."""
    rank = members.rank
    others = [x for other, x in enumerate(xs) if other != rank]
    for piece in cached(xs[0], share_of(len(xs[0]), rank, members.size)):
        total = xs[rank][piece]
        reduction.into(total, total, [other[piece] for other in others])
        for other in others:
            other[piece].copy_(total)
    yield from members.barrier()
