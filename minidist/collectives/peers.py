"""Messages between the ranks of a group: all that the algorithms know of the network.

An algorithm names its peers by their rank *within the group*; a number outside 0..size-1 wraps
round, so that `rank + 1` is the right-hand neighbour on a ring. It hands over flat, contiguous
tensors of any dtype, which travel as raw bytes. An empty tensor is not sent at all: both ends
know that it is empty.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.common.groups import message_device

# Every message of minidist carries this tag, so that a `dist.send` of your own between the same
# two ranks is never taken for one of ours. (NCCL knows no tags and ignores it.)
TAG = 0x6D64  # "md"
PAUSE = 50e-6  # seconds; see Peers.expect

Arrival = tuple[Tensor, int, dist.Work | None]  # what it fills, its source, the handle to wait for


def as_bytes(flat: Tensor) -> Tensor:
    """The bytes of a contiguous vector, as a view. (One of one element may have any stride.)"""
    return flat.as_strided((len(flat),), (1,)).view(torch.uint8)


def wait_for(works: Iterable[dist.Work | None]) -> None:
    """Wait until all these messages are through; None stands for one that was empty."""
    for work in works:
        if work is not None:
            work.wait()


class Peers:
    """The ranks of one group, seen from one of them: `rank` of `size`, and messages among them.
    Raises ValueError for a process outside the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group, self.rank = group, dist.get_rank(group)
        if self.rank < 0:  # what new_group gives to the others
            raise ValueError(f"rank {dist.get_rank()} is not in the group of its collective")
        self.size = dist.get_world_size(group)
        self.global_ranks = dist.get_process_group_ranks(group)  # in group order
        self.backends = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
        self.device = message_device(group)  # where small messages live

    def send(self, tensor: Tensor, to: int) -> None:
        """Send `tensor` and return when it may be overwritten."""
        self._message(dist.send, tensor, group_dst=to % self.size)

    def recv(self, into: Tensor, source: int) -> Tensor:
        """Wait for a message and return `into`, filled."""
        self._message(dist.recv, into, group_src=source % self.size)
        return into

    def isend(self, tensor: Tensor, to: int) -> dist.Work | None:
        """Start to send `tensor`; the handle tells when it may be overwritten. None if empty."""
        return self._message(dist.isend, tensor, group_dst=to % self.size)

    def irecv(self, into: Tensor, source: int) -> dist.Work | None:
        """Start to fill `into` with a message. None if it is empty."""
        return self._message(dist.irecv, into, group_src=source % self.size)

    def _message(self, call: Callable[..., Any], tensor: Tensor, **peer: int) -> Any:
        """What a function of torch gives for a message; None for an empty one."""
        if not tensor.numel():
            return None
        return call(as_bytes(tensor), group=self.group, tag=TAG, **peer)

    def expect(self, messages: Iterable[tuple[Tensor, int]]) -> list[Arrival]:
        """Announce what each message will fill, to its source; `exchange` waits for it. Messages of
        one source come in this order."""
        # gloo moves bytes only to where a place waits for them. Told early, it need not ask.
        arrivals = [
            (into, source, None if into.is_cuda else self.irecv(into, source))
            for into, source in messages
        ]
        # gloo's thread, which reads the announcements of others, spins while ours writes on the
        # same connection. Where there are more ranks than cores, that costs a time slice.
        if arrivals and "gloo" in self.backends:
            time.sleep(PAUSE)
        return arrivals

    def exchange(self, outgoing: Tensor, to: int, arrival: Arrival) -> Tensor:
        """Send `outgoing` while `arrival` comes in; return what it filled."""
        into, source, work = arrival
        if not into.is_cuda:
            wait_for([self.isend(outgoing, to), work])
            return into
        # NCCL has one queue: where every rank first sends, then receives, all wait for ever.
        batch = [
            dist.P2POp(call, as_bytes(x), None, self.group, TAG, other % self.size)
            for call, x, other in ((dist.isend, outgoing, to), (dist.irecv, into, source))
            if x.numel()
        ]
        wait_for(dist.batch_isend_irecv(batch) if batch else [])
        return into

    def parent(self, root: int) -> int:
        """Our parent in the binomial tree below `root` (meaningless at the root itself)."""
        place = (self.rank - root) % self.size
        return (root + (place & (place - 1))) % self.size  # clear the lowest bit that is set

    def children(self, root: int) -> list[int]:
        """Our children in the binomial tree below `root`, the one with the largest subtree first.

        Place v, counted from the root, has the children v + 1, v + 2, v + 4, ... up to its own
        lowest bit: 0 -> 4, 2, 1;  2 -> 3;  4 -> 6, 5;  6 -> 7.
        """
        place = (self.rank - root) % self.size
        limit = place & -place or self.size
        steps = [1 << k for k in range(self.size.bit_length()) if 1 << k < limit]
        return [(root + place + s) % self.size for s in reversed(steps) if place + s < self.size]
