"""The collectives, on memory that all ranks share.

A tensor goes through a rank's staging areas piece by piece, so that a piece is still in the
processor's cache when the others read it. There are several areas: while the others read one piece,
the next goes into another area. So a piece costs one barrier.

Tensors here are flat: (n,), contiguous. Read each operation as the story of one rank.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from minidist.backend.engine import Operation
from minidist.backend.members import STAGE, Members


@dataclass(frozen=True)
class Reduction:
    """How two tensors become one: `add(a, b, out=total)`; and then `finish(total)`."""

    add: Callable[..., object]
    finish: Callable[[torch.Tensor], object] = lambda total: None

    def into(self, total: torch.Tensor, x: torch.Tensor, others: Iterable[torch.Tensor]) -> None:
        """total: x and all others, added up. It may be x itself."""
        for other in others:
            self.add(x, other, out=total)
            x = total
        if x is not total:
            total.copy_(x)
        self.finish(total)


CACHED = 1 << 18  # bytes


def barrier(members: Members) -> Operation:
    """Wait for all."""
    yield from members.agree()


class _Piece:
    """A piece of an all_reduce: `part` (n,) of this rank's tensor, and each rank's room for it."""

    def __init__(self, members: Members, part: torch.Tensor, rooms: list[torch.Tensor]) -> None:
        self.rank, self.part, self.rooms = members.rank, part, [room[0] for room in rooms]
        self.shares = [_share(len(part), rank, members.size) for rank in range(members.size)]

    def stage(self) -> None:
        """Show what the others add up. This rank's own share need not be seen."""
        mine, room = self.shares[self.rank], self.rooms[self.rank]
        room[: mine.start].copy_(self.part[: mine.start])
        room[mine.stop :].copy_(self.part[mine.stop :])

    def add_up(self, reduction: Reduction) -> None:
        """This rank's share, for all to see."""
        mine = self.shares[self.rank]
        others = [room[mine] for rank, room in enumerate(self.rooms) if rank != self.rank]
        reduction.into(self.rooms[self.rank][mine], self.part[mine], others)

    def take(self) -> None:
        """What each rank has added up."""
        for share, room in zip(self.shares, self.rooms, strict=True):
            self.part[share].copy_(room[share])


def all_reduce(
    members: Members, x: torch.Tensor, reduction: Reduction, receivers: Sequence[int]
) -> Operation:
    """x: (n,), in the end the total on the receivers. Rank r adds up the r-th part of each piece.

    Between two barriers a rank takes one piece, adds up the next and stages the one after that: so
    a piece costs one barrier. Where x lies in the arena on every rank, nothing is staged: see
    `_all_reduce_in_place`.
    """
    shared = members.place(x)
    pieces = [_Piece(members, x[cut], rooms) for cut, rooms in _pieces(members, len(x), x.dtype)]
    if not shared:
        pieces[0].stage()
    yield from members.agree()
    if there := members.placed(x):
        if len(there) == members.size:
            yield from _all_reduce_in_place(members, there, reduction)
            return
        if shared:
            pieces[0].stage()
        yield from members.barrier()
    for taken, added, staged in zip_longest([None, *pieces], pieces, pieces[1:]):
        if taken and members.rank in receivers:
            taken.take()
        if added:
            added.add_up(reduction)
        if staged:
            staged.stage()
        if added:
            yield from members.barrier()


def _all_reduce_in_place(
    members: Members, xs: Sequence[torch.Tensor], reduction: Reduction
) -> Operation:
    """Rank r adds up the r-th part of all ranks' tensors, and writes it into all of them, in pieces
    that stay in its cache."""
    rank = members.rank
    others = [x for other, x in enumerate(xs) if other != rank]
    mine = _share(len(xs[0]), rank, members.size)
    for start in range(mine.start, mine.stop, CACHED // xs[0].element_size()):
        piece = slice(start, min(start + CACHED // xs[0].element_size(), mine.stop))
        total = xs[rank][piece]
        reduction.into(total, total, [other[piece] for other in others])
        for other in others:
            other[piece].copy_(total)
    yield from members.barrier()


def broadcast(members: Members, x: torch.Tensor, root: int) -> Operation:
    """x: (n,), in the end the root's."""
    for piece, rooms in _pieces(members, len(x), x.dtype):
        if members.rank == root:
            rooms[root][0].copy_(x[piece])
        yield from members.agree()
        if members.rank != root:
            x[piece].copy_(rooms[root][0])


def all_gather(members: Members, outs: Sequence[torch.Tensor], x: torch.Tensor) -> Operation:
    """outs: (n,) for each rank's x; none on a rank that does not want them."""
    for piece, rooms in _pieces(members, len(x), x.dtype):
        rooms[members.rank][0].copy_(x[piece])
        yield from members.agree()
        for out, room in zip(outs, rooms, strict=False):
            out[piece].copy_(room[0])


def scatter(
    members: Members, x: torch.Tensor, parts: Sequence[torch.Tensor], root: int
) -> Operation:
    """x: (n,), in the end the root's part for this rank. parts: (n,) for each, on the root only."""
    for piece, rooms in _pieces(members, len(x), x.dtype, members.size):
        for room, part in zip(rooms[root], parts, strict=False):
            room.copy_(part[piece])
        yield from members.agree()
        x[piece].copy_(rooms[root][members.rank])


def reduce_scatter(
    members: Members, x: torch.Tensor, parts: Sequence[torch.Tensor], reduction: Reduction
) -> Operation:
    """x: (n,), in the end the sum of all ranks' parts for this one. parts: (n,) for each rank."""
    rank = members.rank
    for piece, rooms in _pieces(members, len(x), x.dtype, members.size):
        for room, part in zip(rooms[rank], parts, strict=True):
            room.copy_(part[piece])
        yield from members.agree()
        first, *others = [room[rank] for room in rooms]
        reduction.into(x[piece], first, others)


def all_to_all(
    members: Members, outs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]
) -> Operation:
    """outs: what each rank has for this one. parts: what this one has for each. Of any lengths."""
    rank, size = members.rank, members.size
    sizes = torch.empty(size, 2, size, dtype=torch.int64)  # of each rank: given, expected
    mine = torch.tensor([list(map(len, parts)), list(map(len, outs))])
    yield from all_gather(members, sizes.view(size, -1).unbind(), mine.view(-1))
    for sender, receiver in (sizes[:, 0] != sizes[:, 1].T).nonzero().tolist():
        raise RuntimeError(
            f"all_to_all: rank {sender} gives {sizes[sender, 0, receiver]} elements to rank "
            f"{receiver}, which expects {sizes[receiver, 1, sender]}"
        )
    for piece, rooms in _pieces(members, int(sizes.max()), parts[0].dtype, size):
        for room, part in zip(rooms[rank], parts, strict=True):
            room[: len(part[piece])].copy_(part[piece])
        yield from members.agree()
        for room, out in zip(rooms, outs, strict=True):
            out[piece].copy_(room[rank][: len(out[piece])])


def _pieces(
    members: Members, n: int, dtype: torch.dtype, parts: int = 1
) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """Cut n elements into pieces of which `parts` fit into a staging area, at least one. With each
    comes every rank's room for it: (parts, length)."""
    most = STAGE // parts // dtype.itemsize
    for start in range(0, max(n, 1), most):
        length = min(most, n - start)
        yield slice(start, start + length), members.rooms(parts, length, dtype)


def _share(n: int, rank: int, size: int) -> slice:
    """The part of n elements that this rank adds up."""
    return slice(n * rank // size, n * (rank + 1) // size)
