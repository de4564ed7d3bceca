"""The collectives, on memory that all ranks share.

The other ranks read a tensor that lies in the arena there. Any other tensor goes through a rank's
staging areas piece by piece, so that a piece is still in the processor's cache when the others read
it. There are several areas: while the others read one piece, the next goes into another area. So a
piece costs one barrier.

Each operation fills `outs` from `ins`, or changes its one out. Tensors here are flat: (n,),
contiguous. Read each operation as the story of one rank.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial

import torch

from minidist.machine.backend.group import STAGE, Members
from minidist.machine.backend.queues import Operation, Wait
from minidist.machine.backend.tensors import Reduction

# What a rank does with a piece of a tensor, and with the room that each rank has for it.
Rooms = Sequence[torch.Tensor] | Mapping[int, torch.Tensor]
Act = Callable[[slice, Rooms], None]
Flats = Sequence[torch.Tensor]  # (n,) each

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
    members: Members, ranks: Sequence[int], x: torch.Tensor | None, stage: Callable[[], object]
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


def cached(share: slice, itemsize: int) -> Iterator[slice]:
    """Cut a share of a tensor into pieces that stay in a processor's cache while added up."""
    step = CACHED // itemsize
    for start in range(share.start, share.stop, step):
        yield slice(start, min(start + step, share.stop))


# ---- all_reduce -----------------------------------------------------------------------------


def all_reduce(members: Members, outs: Flats, _: Flats, reduction: Reduction) -> Operation:
    """The out, (n,), becomes the total. Rank r adds up the r-th part of each piece. Before each
    barrier a rank adds up one piece and stages the next: so a piece costs one barrier."""
    (x,), rank, size = outs, members.rank, members.size
    if x.nbytes <= SMALL:  # in the order of ranks: so all have the same bits
        rooms = members.rooms(len(x), x.dtype)
        rooms[rank].copy_(x)
        yield from members.agree()
        reduction.into(x, rooms[0], rooms[1:])
        return
    others = [r for r in range(size) if r != rank]

    def stage(cut: slice, rooms: Rooms) -> None:  # our own share need not be seen
        for share in [share_of(len(rooms[rank]), r, size) for r in others]:
            rooms[rank][share].copy_(x[cut][share])

    def add_up(cut: slice, rooms: Rooms) -> None:
        mine = share_of(len(rooms[rank]), rank, size)
        total = x[cut][mine]
        reduction.into(total, total, [rooms[r][mine] for r in others])
        rooms[rank][mine].copy_(total)

    pieces = pieces_of(members, len(x), x.dtype)
    first = next(pieces)
    there = yield from show(members, range(size), x, partial(stage, *first))
    if there:
        yield from _all_reduce_in_place(members, there, reduction)
        return
    piece: tuple[slice, list[torch.Tensor]] | None = first
    while piece:
        (cut, rooms), following = piece, next(pieces, None)
        add_up(cut, rooms)
        if following:
            stage(*following)
        yield from members.barrier()
        for share, r in [(share_of(len(rooms[r]), r, size), r) for r in others]:
            x[cut][share].copy_(rooms[r][share])
        piece = following


def _all_reduce_in_place(
    members: Members, xs: dict[int, torch.Tensor], reduction: Reduction
) -> Operation:
    """Rank r adds up the r-th part of all ranks' tensors, and writes it into all of them."""
    x = xs.pop(members.rank)
    for piece in cached(share_of(len(x), members.rank, members.size), x.itemsize):
        total = x[piece]
        reduction.into(total, total, [other[piece] for other in xs.values()])
        for other in xs.values():
            other[piece].copy_(total)
    yield from members.barrier()


def share_of(n: int, rank: int, size: int) -> slice:
    """The part of n elements that this rank adds up."""
    return slice(n * rank // size, n * (rank + 1) // size)


# ---- the others -----------------------------------------------------------------------------


def broadcast(members: Members, outs: Flats, _: Flats, root: int) -> Operation:
    """The out, (n,), becomes the root's."""
    (x,) = outs

    def stage(cut: slice, rooms: Rooms) -> None:
        if members.rank == root:
            rooms[root].copy_(x[cut])

    def take(cut: slice, rooms: Rooms) -> None:
        if members.rank != root:
            x[cut].copy_(rooms[root])

    yield from exchange(members, [root], x, x, stage, take)


def all_gather(members: Members, outs: Flats, ins: Flats) -> Operation:
    """outs: room for each rank's in, (n,); none on a rank that does not want them."""
    yield from _gather(members, [[out] for out in outs], ins[0])


def all_gather_single(members: Members, outs: Flats, ins: Flats) -> Operation:
    """outs: for each in, (n,), room for those of all ranks, (ranks * n,). Of one dtype."""
    by_rank = zip(*[out.view(members.size, -1) for out in outs], strict=True)
    whole = joined(ins)
    yield from _gather(members, list(by_rank), torch.cat(list(ins)) if whole is None else whole)


def _gather(members: Members, outs: Sequence[Flats], x: torch.Tensor) -> Operation:
    """outs: for each rank's x, (n,), the parts into which it goes, one behind another."""

    def stage(cut: slice, rooms: Rooms) -> None:
        rooms[members.rank].copy_(x[cut])

    def take(cut: slice, rooms: Rooms) -> None:
        for rank, parts in enumerate(outs):
            _into(parts, cut.start, rooms[rank])

    yield from exchange(members, range(members.size), x, x, stage, take)


def _into(parts: Flats, begin: int, source: torch.Tensor) -> None:
    """Copy the source to `begin` and behind, as if the parts were one tensor."""
    for part in parts:
        low, high = max(begin, 0), min(begin + len(source), len(part))
        if low < high:
            target, piece = part[low:high], source[low - begin : high - begin]
            if target.data_ptr() != piece.data_ptr():  # or it lies there already
                target.copy_(piece)
        begin -= len(part)


def scatter(members: Members, outs: Flats, ins: Flats, root: int) -> Operation:
    """The out, (n,), becomes the root's part for this rank. ins: one for each, on the root only."""
    (x,) = outs

    def stage(cut: slice, rooms: Rooms) -> None:
        for room, part in zip(rooms[root], ins, strict=False):
            room.copy_(part[cut])

    def take(cut: slice, rooms: Rooms) -> None:
        x[cut].copy_(rooms[root][members.rank])

    yield from exchange(members, [root], None, x, stage, take, members.size)


def reduce_scatter(members: Members, outs: Flats, ins: Flats, reduction: Reduction) -> Operation:
    """The out, (n,), becomes the sum of all ranks' parts for this one. ins: one for each rank."""
    (x,), rank, size = outs, members.rank, members.size

    def stage(cut: slice, rooms: Rooms) -> None:
        for room, part in zip(rooms[rank], ins, strict=True):
            room.copy_(part[cut])

    def take(cut: slice, rooms: Rooms) -> None:
        total = x[cut]
        # Our own first: in the arena, total may be that very memory.
        order = [rank, *(r for r in range(size) if r != rank)]
        first, *others = [rooms[r].view(size, len(total))[rank] for r in order]
        for piece in cached(slice(0, len(total)), total.itemsize):
            reduction.into(total[piece], first[piece], [other[piece] for other in others])

    yield from exchange(members, range(size), joined(ins), x, stage, take, size)


def all_to_all(members: Members, outs: Flats, ins: Flats) -> Generator[Wait, None, list[list[int]]]:
    """outs: what each rank has for this one. ins: what this one has for each. Of any lengths.
    Returns how many bytes each rank has for each."""
    rank, size = members.rank, members.size
    sizes = torch.empty(size, 2, size, dtype=torch.int64)  # of each rank: given, expected
    mine = torch.tensor([list(map(len, ins)), list(map(len, outs))])
    yield from all_gather(members, list(sizes.view(size, -1)), [mine.view(-1)])
    for sender, receiver in (sizes[:, 0] != sizes[:, 1].T).nonzero().tolist():
        raise RuntimeError(
            f"all_to_all: rank {sender} gives {sizes[sender, 0, receiver]} elements to rank "
            f"{receiver}, which expects {sizes[receiver, 1, sender]}"
        )
    for piece, rooms in pieces_of(members, int(sizes.max()), ins[0].dtype, size):
        for room, part in zip(rooms[rank], ins, strict=True):
            room[: len(part[piece])].copy_(part[piece])
        yield from members.agree()
        for room, out in zip(rooms, outs, strict=True):
            out[piece].copy_(room[rank][: len(out[piece])])
    given: list[list[int]] = (sizes[:, 0] * ins[0].itemsize).tolist()
    return given
