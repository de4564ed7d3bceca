"""How the other ranks see a tensor of a collective: where it lies, or in staging areas.

They read a tensor that lies in the arena there. Any other tensor goes through a rank's staging
areas piece by piece, so that a piece is still in the processor's cache when the others read it.
There are several areas: while the others read one piece, the next goes into another area. So a
piece costs one barrier.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial

import torch

from minidist.backend.members import STAGE, Members
from minidist.backend.queues import Operation, Wait

# A piece of a tensor, and every rank's room for it.
Staged = tuple[slice, list[torch.Tensor]]

CACHED = 1 << 18  # bytes of a piece that is added up


def exchange(
    members: Members,
    x: torch.Tensor | None,
    ranks: Sequence[int],
    pieces: Iterator[Staged],
    stage: Callable[[slice, list[torch.Tensor]], None],
    take: Callable[[slice, list[torch.Tensor]], None],
    take_there: Callable[[list[torch.Tensor]], None],
) -> Operation:
    """Let the others see x of these ranks: where it lies, or piece by piece."""
    first = next(pieces)
    if there := (yield from show(members, x, ranks, partial(stage, *first))):
        take_there(there)
        yield from members.barrier()  # nobody changes what another still reads
        return
    take(*first)
    for piece in pieces:
        stage(*piece)
        yield from members.barrier()
        take(*piece)


def show(
    members: Members,
    x: torch.Tensor | None,
    ranks: Sequence[int],
    stage: Callable[[], None],
) -> Generator[Wait, None, list[torch.Tensor]]:
    """Let the others see x of these ranks, and check that all make the same call. If it lies in the
    arena on each of them: those tensors, (n,), to be read until the next barrier. Else nothing, and
    on each rank `stage` has been called, which stages a first piece."""
    shared = members.share(x if members.rank in ranks else None)
    if not shared:
        stage()
    yield from members.agree()
    found = [members.has_shared(rank) for rank in ranks]
    if all(found) and x is not None:
        return [members.shared(rank, x) for rank in ranks]
    if any(found):  # somewhere else it does not
        if shared:
            stage()
        yield from members.barrier()
    return []


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Tensors (n,) that lie one behind another in one piece of memory, as one."""
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


def pieces_of(members: Members, n: int, dtype: torch.dtype, parts: int = 0) -> Iterator[Staged]:
    """Cut n elements into pieces of which `parts` fit into a staging area, at least one. With each
    comes every rank's room for it: (length,), or (parts, length) for several."""
    most = STAGE // max(parts, 1) // dtype.itemsize
    for start in range(0, max(n, 1), most):
        length = min(most, n - start)
        yield slice(start, start + length), members.rooms(length, dtype, parts)


def share_of(n: int, rank: int, size: int) -> slice:
    """The part of n elements that this rank adds up."""
    return slice(n * rank // size, n * (rank + 1) // size)
