"""Who owns which rows of a parameter (lesson: zero), and the two collectives of shards.

Each parameter is cut along its first dimension into N parts of n rows, n = R/N rounded up: as
torch's `DTensor` with the placement `Shard(0)` does, so that a rank's rows are one. In a message of
several parameters each rank's rows of all of them are together: (N, S).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from minidist.machine import backend

# Gloo makes an all_gather of copies, and a reduce_scatter of a whole all_reduce. N broadcasts, or N
# reductions, of a shard each do the same up to four times faster.
_BY_SHARD = "gloo"
ALONE = 2**20  # bytes of a parameter that travels alone, straight into its place


class Cut:
    """How the ranks of a group share out the rows of parameters."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        # Rows of gradients while a pass adds another one, which is whole until it is cut.
        self.kept: dict[nn.Parameter, Any] = {}
        self._mesh: DeviceMesh | None = None

    def rows(self, tensor: torch.Tensor) -> int:
        """n: of each rank but the last ones, which may have fewer."""
        return -(-len(tensor) // self.ranks)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor that belongs to a parameter and has its shape: a view."""
        n = self.rows(tensor)
        return tensor[self.rank * n : (self.rank + 1) * n]

    def whole(self, own: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The tensor of the shape of `like` whose rows the ranks have: a DTensor."""
        from torch.distributed.tensor import Shard  # takes a third of torch's own time

        from minidist.common.dtensor import of_local

        if self._mesh is None:
            self._mesh = DeviceMesh.from_group(self.group, like.device.type)
        return of_local(own, self._mesh, [Shard(0)], like.shape)


class FlatParameters:
    """Parameters of one dtype and device, laid end to end in one flat tensor, each padded to N n
    rows. From now on they are views of it, and what a rank receives arrives where the model reads
    it: where ranks share memory in that, nothing is copied."""

    def __init__(self, parameters: Sequence[nn.Parameter], cut: Cut) -> None:
        self.cut, first = cut, parameters[0]
        sizes = [cut.ranks * cut.rows(p) * p[:1].numel() for p in parameters]
        flat = backend.empty(sum(sizes), dtype=first.dtype, device=first.device, group=cut.group)
        self.blocks = flat.split(sizes)  # (N n …,) each
        self.own: dict[torch.Tensor, nn.Parameter] = {}  # this rank's rows of each
        for parameter, block in zip(parameters, self.blocks, strict=True):
            block[parameter.numel() :] = 0
            view = block[: parameter.numel()].view(parameter.shape)
            parameter.data = view.copy_(parameter.data)
            self.own[parameter] = nn.Parameter(cut.own(parameter.data))

    def gather(self) -> list[Callable[[], None]]:
        """Begin to give every rank all rows: in one message, but for large parameters. Returns the
        functions that wait."""
        cut, small = self.cut, [block for block in self.blocks if block.nbytes < ALONE]
        waits = [all_gather(block, cut.group) for block in self.blocks if block.nbytes >= ALONE]
        if small:
            own = [block.chunk(cut.ranks)[cut.rank] for block in small]
            waits.append(all_gather_each(small, cut.group, own))
        return waits


def deal(place: torch.Tensor, whole: torch.Tensor, scale: float) -> None:
    """Copy a whole tensor, times scale, to a place (N, n) for all ranks' rows. What is behind its
    last row stays as it was: nobody reads it."""
    flat, length = whole.reshape(-1), place.shape[1]
    ranks, rest = divmod(len(flat), length or 1)  # so many have all of their rows
    torch.mul(flat[: ranks * length].view(ranks, length), scale, out=place[:ranks])
    if rest:
        torch.mul(flat[ranks * length :], scale, out=place[ranks, :rest])


# ---- the two collectives -----------------------------------------------------------------------


def all_gather(
    x: torch.Tensor, group: dist.ProcessGroup, own: torch.Tensor | None = None
) -> Callable[[], None]:
    """Begin to give every rank all shards. Each has its `own` (S,), in its place in x if that is
    None. Returns the function that waits."""
    shards = x.chunk(dist.get_world_size(group))
    place = shards[dist.get_rank(group)]
    if dist.get_backend(group) == _BY_SHARD:
        if own is not None:
            place.copy_(own)
        works: list[Any] = [
            dist.broadcast(shard, group=group, group_src=rank, async_op=True)
            for rank, shard in enumerate(shards)
        ]
    else:
        works = [
            dist.all_gather_single(x, place if own is None else own, group=group, async_op=True)
        ]
    return lambda: _wait(works)


def all_gather_each(
    places: Sequence[torch.Tensor], group: dist.ProcessGroup, own: Sequence[torch.Tensor]
) -> Callable[[], None]:
    """Begin to put all shards of several tensors into their places, (N n,) each, in one message.
    `own` are this rank's, (n,) each. Returns the function that waits."""
    if len(places) == 1:
        return all_gather(places[0], group, own[0])
    if dist.get_backend(group) == "shm":  # it writes each where it belongs
        shm: Any = group
        work = shm.all_gather_single_coalesced(list(places), list(own))
        return lambda: _wait([work])
    ranks, sizes = dist.get_world_size(group), [len(each) for each in own]
    gathered = own[0].new_empty(ranks, sum(sizes))
    torch.cat(list(own), out=gathered[dist.get_rank(group)])
    arrive = all_gather(gathered.view(-1), group)

    def wait() -> None:
        arrive()
        for place, shards in zip(places, gathered.split(sizes, 1), strict=True):
            place.view(ranks, -1).copy_(shards)

    return wait


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Begin to add up the ranks' tensors. Returns the function that waits, and gives this rank's
    shard of the sum: (S,), in memory of its own. What is left in x is not to be used."""
    shards = x.chunk(dist.get_world_size(group))
    own = shards[dist.get_rank(group)]
    total = torch.empty_like(own)
    if by_shard := dist.get_backend(group) == _BY_SHARD:
        works: list[Any] = [
            dist.reduce(shard, group=group, group_dst=rank, async_op=True)
            for rank, shard in enumerate(shards)
        ]
    else:
        works = [dist.reduce_scatter_single(total, x, group=group, async_op=True)]

    def wait() -> torch.Tensor:
        _wait(works)
        return total.copy_(own) if by_shard else total

    return wait


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()
