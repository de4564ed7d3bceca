"""The collectives, on memory that all ranks share.

The other ranks read a tensor that lies in the arena there. Any other tensor goes through a rank's
staging areas piece by piece, so that a piece is still in the processor's cache when the others read
it. There are several areas: while the others read one piece, the next goes into another area. So a
piece costs one barrier.

Tensors here are flat: (n,), contiguous. Read each operation as the story of one rank.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial

import torch

from minidist.machine.backend.members import STAGE, Members
from minidist.machine.backend.queues import Operation, Wait
from minidist.machine.backend.tensors import Reduction

# What a rank does with a piece of a tensor, and with the room that each rank has for it.
Rooms = Sequence[torch.Tensor] | Mapping[int, torch.Tensor]
Act = Callable[[slice, Rooms], None]

CACHED = 1 << 18  # bytes of a piece that is added up
SMALL = 1 << 15  # bytes up to which every rank adds up everything: it costs less than a barrier


# ---- how the others see a tensor ------------------------------------------------------------


def exchange(
    members: Members,
    ranks: Sequence[int],
    shown: torch.Tensor | None,
    like: torch.Tensor,
    stage: Act,
    take: Act,
    rows: int = 0,
) -> Operation:
    """Let all ranks read the tensors that these `ranks` have `shown`: where they lie, if all lie in
    the arena, or else piece by piece. For each piece a rank calls `stage`, and `take` once all have
    staged it; in the arena, `take` alone, for the whole. Pieces are cut as those of `like`, (n,); a
    rank stages `rows` such tensors, or one if 0."""
    pieces = pieces_of(members, len(like), like.dtype, rows)
    first = next(pieces)
    if there := (yield from show(members, ranks, shown, partial(stage, *first))):
        take(slice(0, len(like)), there)
        yield from members.barrier()  # nobody changes what another still reads
        return
    take(*first)
    for piece in pieces:
        stage(*piece)
        yield from members.barrier()
        take(*piece)


def show(
    members: Members, ranks: Sequence[int], x: torch.Tensor | None, stage: Callable[[], None]
) -> Generator[Wait, None, dict[int, torch.Tensor]]:
    """Check that all ranks make the same call. If the x of each of these ranks lies in the arena,
    return them all, valid until the next barrier. Otherwise stage the first piece and return {}."""
    shared = members.share(x if members.rank in ranks else None)
    if not shared:
        stage()
    yield from members.agree()
    found = [members.has_shared(rank) for rank in ranks]
    if all(found) and x is not None:
        return {rank: members.shared(rank, x) for rank in ranks}
    if any(found):  # but not all: who has not staged does so now
        if shared:
            stage()
        yield from members.barrier()
    return {}


def pieces_of(
    members: Members, n: int, dtype: torch.dtype, rows: int = 0
) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """Cut n elements into one or more pieces, of which `rows` fit into a staging area. With each
    comes every rank's room for it: (length,), or (rows, length)."""
    most = STAGE // max(rows, 1) // dtype.itemsize
    for start in range(0, max(n, 1), most):
        length = min(most, n - start)
        yield slice(start, start + length), members.rooms(length, dtype, rows)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Tensors (n,) that lie one behind another in one piece of memory, as one; else None."""
    parts = [part for part in parts if len(part)] or list(parts[:1])  # an empty one has no address
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end:
            return None
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += part.nbytes
    return first.as_strided((sum(map(len, parts)),), (1,))


def cached(x: torch.Tensor, share: slice) -> Iterator[slice]:
    """Cut a share of x into pieces that stay in a processor's cache while they are added up."""
    step = CACHED // x.element_size()
    for start in range(share.start, share.stop, step):
        yield slice(start, min(start + step, share.stop))


# ---- all_reduce and reduce ------------------------------------------------------------------


def all_reduce(
    members: Members, x: torch.Tensor, reduction: Reduction, receivers: Sequence[int]
) -> Operation:
    """x: (n,), in the end the total on the receivers. Rank r adds up the r-th part of each piece.

    Between two barriers a rank takes one piece, adds up the next and stages the one after that: so
    a piece costs one barrier.
    """
    received = members.rank in receivers
    if x.nbytes <= SMALL:  # in the order of ranks: so all have the same bits
        rooms = members.rooms(len(x), x.dtype)
        rooms[members.rank].copy_(x)
        yield from members.agree()
        if received:
            reduction.into(x, rooms[0], rooms[1:])
        return
    pieces = (Piece(members, x[cut], rooms) for cut, rooms in pieces_of(members, len(x), x.dtype))
    first = next(pieces)
    if there := (yield from show(members, range(members.size), x, first.stage)):
        yield from _all_reduce_in_place(members, there, reduction, receivers)
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


class Piece:
    """A piece of an all_reduce: `part` (n,) of this rank's tensor, and each rank's room for it."""

    def __init__(self, members: Members, part: torch.Tensor, rooms: list[torch.Tensor]) -> None:
        shares = [share_of(len(part), rank, members.size) for rank in range(members.size)]
        self.part, self.room, self.mine = part, rooms[members.rank], shares[members.rank]
        self.others = list(zip(shares, rooms, strict=True))  # each one's share, and room
        del self.others[members.rank]

    def stage(self) -> None:
        """Show what the others add up. This rank's own share need not be seen."""
        for share, _ in self.others:
            self.room[share].copy_(self.part[share])

    def add_up(self, reduction: Reduction, received: bool) -> None:
        """This rank's share, in its place if that is wanted here, and for all to see."""
        room, part = self.room[self.mine], self.part[self.mine]
        total = part if received else room
        reduction.into(total, part, [room[self.mine] for _, room in self.others])
        if received:
            room.copy_(total)

    def take(self) -> None:
        """What the others have added up."""
        for share, room in self.others:
            self.part[share].copy_(room[share])


def _all_reduce_in_place(
    members: Members,
    xs: dict[int, torch.Tensor],
    reduction: Reduction,
    receivers: Sequence[int],
) -> Operation:
    """Rank r adds up the r-th part of all ranks' tensors, and writes it into the receivers'."""
    home = members.rank if members.rank in receivers else receivers[0]
    x, others = xs[home], [xs[rank] for rank in xs if rank != home]
    for piece in cached(x, share_of(len(x), members.rank, members.size)):
        total = x[piece]
        reduction.into(total, total, [other[piece] for other in others])
        for rank in receivers:
            if rank != home:
                xs[rank][piece].copy_(total)
    yield from members.barrier()


def share_of(n: int, rank: int, size: int) -> slice:
    """The part of n elements that this rank adds up."""
    return slice(n * rank // size, n * (rank + 1) // size)


# ---- the others -----------------------------------------------------------------------------


def broadcast(members: Members, x: torch.Tensor, root: int) -> Operation:
    """x: (n,), in the end the root's."""

    def stage(cut: slice, rooms: Rooms) -> None:
        if members.rank == root:
            rooms[root].copy_(x[cut])

    def take(cut: slice, rooms: Rooms) -> None:
        if members.rank != root:
            x[cut].copy_(rooms[root])

    yield from exchange(members, [root], x, x, stage, take)


def all_gather(
    members: Members, outs: Sequence[Sequence[torch.Tensor]], x: torch.Tensor
) -> Operation:
    """outs: for each rank's x (n,) the parts into which it goes, one behind another; none on a rank
    that does not want them."""

    def stage(cut: slice, rooms: Rooms) -> None:
        rooms[members.rank].copy_(x[cut])

    def take(cut: slice, rooms: Rooms) -> None:
        for rank, parts in enumerate(outs):
            _into(parts, cut.start, rooms[rank])

    yield from exchange(members, range(members.size), x, x, stage, take)


def _into(parts: Sequence[torch.Tensor], begin: int, source: torch.Tensor) -> None:
    """Copy the source to `begin` and behind, as if the parts were one tensor."""
    for part in parts:
        low, high = max(begin, 0), min(begin + len(source), len(part))
        if low < high:
            target, piece = part[low:high], source[low - begin : high - begin]
            if target.data_ptr() != piece.data_ptr():  # or it lies there already
                target.copy_(piece)
        begin -= len(part)


def scatter(
    members: Members, x: torch.Tensor, parts: Sequence[torch.Tensor], root: int
) -> Operation:
    """x: (n,), in the end the root's part for this rank. parts: (n,) for each, on the root only."""

    def stage(cut: slice, rooms: Rooms) -> None:
        for room, part in zip(rooms[root], parts, strict=False):
            room.copy_(part[cut])

    def take(cut: slice, rooms: Rooms) -> None:
        x[cut].copy_(rooms[root][members.rank])

    yield from exchange(members, [root], None, x, stage, take, members.size)


def reduce_scatter(
    members: Members, x: torch.Tensor, parts: Sequence[torch.Tensor], reduction: Reduction
) -> Operation:
    """x: (n,), in the end the sum of all ranks' parts for this one. parts: (n,) for each rank."""
    rank, size = members.rank, members.size

    def stage(cut: slice, rooms: Rooms) -> None:
        for room, part in zip(rooms[rank], parts, strict=True):
            room.copy_(part[cut])

    def take(cut: slice, rooms: Rooms) -> None:
        total = x[cut]
        # Our own first: in the arena, total may be that very memory.
        order = [rank, *(r for r in range(size) if r != rank)]
        first, *others = [rooms[r].view(size, len(total))[rank] for r in order]
        for piece in cached(total, slice(0, len(total))):
            reduction.into(total[piece], first[piece], [other[piece] for other in others])

    yield from exchange(members, range(size), joined(parts), x, stage, take, size)


def all_to_all(
    members: Members, outs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]
) -> Generator[Wait, None, list[list[int]]]:
    """outs: what each rank has for this one. parts: what this one has for each. Of any lengths.
    Returns how many bytes each rank has for each."""
    rank, size = members.rank, members.size
    sizes = torch.empty(size, 2, size, dtype=torch.int64)  # of each rank: given, expected
    mine = torch.tensor([list(map(len, parts)), list(map(len, outs))])
    yield from all_gather(members, [[each] for each in sizes.view(size, -1)], mine.view(-1))
    for sender, receiver in (sizes[:, 0] != sizes[:, 1].T).nonzero().tolist():
        raise RuntimeError(
            f"all_to_all: rank {sender} gives {sizes[sender, 0, receiver]} elements to rank "
            f"{receiver}, which expects {sizes[receiver, 1, sender]}"
        )
    for piece, rooms in pieces_of(members, int(sizes.max()), parts[0].dtype, size):
        for room, part in zip(rooms[rank], parts, strict=True):
            room[: len(part[piece])].copy_(part[piece])
        yield from members.agree()
        for room, out in zip(rooms, outs, strict=True):
            out[piece].copy_(room[rank][: len(out[piece])])
    given: list[list[int]] = (sizes[:, 0] * parts[0].itemsize).tolist()
    return given
