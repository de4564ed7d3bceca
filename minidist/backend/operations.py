"""The collectives, on memory that all ranks share; `all_reduce` has a file of its own.

Tensors here are flat: (n,), contiguous. Read each operation as the story of one rank.
"""

from collections.abc import Generator, Sequence

import torch

from minidist.backend.members import Members
from minidist.backend.queues import Operation, Wait
from minidist.backend.reduction import Reduction
from minidist.backend.staging import cached, exchange, joined, pieces_of


def barrier(members: Members) -> Operation:
    """Wait for all."""
    yield from members.agree()


def broadcast(members: Members, x: torch.Tensor, root: int) -> Operation:
    """x: (n,), in the end the root's."""
    receives = members.rank != root

    def stage(cut: slice, rooms: list[torch.Tensor]) -> None:
        if not receives:
            rooms[root].copy_(x[cut])

    def take(cut: slice, rooms: list[torch.Tensor]) -> None:
        if receives:
            x[cut].copy_(rooms[root])

    def take_there(there: list[torch.Tensor]) -> None:
        if receives:
            x.copy_(there[0])

    pieces = pieces_of(members, len(x), x.dtype)
    yield from exchange(members, x, [root], pieces, stage, take, take_there)


def all_gather(
    members: Members, outs: Sequence[Sequence[torch.Tensor]], x: torch.Tensor
) -> Operation:
    """outs: for each rank's x (n,) the parts into which it goes, one behind another; none on a rank
    that does not want them."""

    def stage(cut: slice, rooms: list[torch.Tensor]) -> None:
        rooms[members.rank].copy_(x[cut])

    def take(cut: slice, rooms: list[torch.Tensor]) -> None:
        for parts, room in zip(outs, rooms, strict=False):
            _into(parts, cut.start, room)

    def take_there(there: list[torch.Tensor]) -> None:
        for rank, parts in enumerate(outs):
            if rank != members.rank:
                _into(parts, 0, there[rank])
            elif [part.data_ptr() for part in parts] != [x.data_ptr()]:
                _into(parts, 0, x)

    pieces = pieces_of(members, len(x), x.dtype)
    yield from exchange(members, x, range(members.size), pieces, stage, take, take_there)


def _into(parts: Sequence[torch.Tensor], begin: int, source: torch.Tensor) -> None:
    """Copy it to the place `begin` of these tensors, which count one behind another."""
    for part in parts:
        low, high = max(begin, 0), min(begin + len(source), len(part))
        if low < high:
            part[low:high].copy_(source[low - begin : high - begin])
        begin -= len(part)


def scatter(
    members: Members, x: torch.Tensor, parts: Sequence[torch.Tensor], root: int
) -> Operation:
    """x: (n,), in the end the root's part for this rank. parts: (n,) for each, on the root only."""
    for piece, rooms in pieces_of(members, len(x), x.dtype, members.size):
        for room, part in zip(rooms[root], parts, strict=False):
            room.copy_(part[piece])
        yield from members.agree()
        x[piece].copy_(rooms[root][members.rank])


def reduce_scatter(
    members: Members, x: torch.Tensor, parts: Sequence[torch.Tensor], reduction: Reduction
) -> Operation:
    """x: (n,), in the end the sum of all ranks' parts for this one. parts: (n,) for each rank."""
    rank, size = members.rank, members.size

    def stage(cut: slice, rooms: list[torch.Tensor]) -> None:
        for room, part in zip(rooms[rank], parts, strict=True):
            room.copy_(part[cut])

    def take(cut: slice, rooms: list[torch.Tensor]) -> None:
        first, *others = [room[rank] for room in rooms]
        reduction.into(x[cut], first, others)

    def take_there(there: list[torch.Tensor]) -> None:
        first, *others = [whole.view(size, -1)[rank] for whole in there]
        for cut in cached(x, slice(0, len(x))):
            reduction.into(x[cut], first[cut], [other[cut] for other in others])

    pieces = pieces_of(members, len(x), x.dtype, size)
    yield from exchange(members, joined(parts), range(size), pieces, stage, take, take_there)


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
