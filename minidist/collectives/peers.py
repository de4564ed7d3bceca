"""Messages between the ranks of a group: all that the algorithms know of the network.

An algorithm names its peers by their rank *within the group*; a number outside 0..size-1 wraps
round, so that `rank + 1` is the right-hand neighbour on a ring. It hands over flat, contiguous
tensors of any dtype, which travel as raw bytes. An empty tensor is not sent at all: both ends
know that it is empty.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from minidist.common.groups import message_device

# Every message of minidist carries this tag, so that a `dist.send` of your own between the same
# two ranks is never taken for one of ours. (NCCL knows no tags and ignores it.)
TAG = 0x6D64  # "md"

PAUSE = 50e-6  # seconds; see Peers._let_announcements_out


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """The bytes of a flat, contiguous tensor, as a view: (n,) of any dtype -> (n * itemsize,)."""
    # A tensor of one element may have any stride, and is contiguous.
    return flat.as_strided((len(flat),), (1,)).view(torch.uint8)


def wait_for(works: Iterable[dist.Work | None]) -> None:
    """Wait until all these messages are through; None stands for one that was empty."""
    for work in works:
        if work is not None:
            work.wait()


@dataclass
class Arrival:
    """A receive that has been announced: the tensor that it fills, and the handle to wait for."""

    into: torch.Tensor
    source: int
    work: dist.Work | None = None


class Peers:
    """The ranks of one group, seen from one of them: `rank` of `size`, and messages among them.

    Raises ValueError when the calling process is not a member of the group; its messages raise it
    for tensors on a GPU over gloo.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        outside: object = dist.GroupMember.NON_GROUP_MEMBER  # what new_group gives to the others
        if group is outside or dist.get_rank(group) < 0:
            raise ValueError(
                f"rank {dist.get_rank()} called a collective of a group that it does not belong to"
            )
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.backends = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
        self._announced = False

    @property
    def global_ranks(self) -> list[int]:
        """The ranks of the group's members in the whole world, in group order."""
        return dist.get_process_group_ranks(self.group)

    @property
    def device(self) -> torch.device:
        """Where small messages live."""
        return message_device(self.group)

    def isend(self, tensor: torch.Tensor, to: int) -> dist.Work | None:
        """Start to send `tensor`; the handle tells when it may be overwritten. None if empty."""
        return self._message(dist.isend, tensor, group_dst=to % self.size)

    def irecv(self, into: torch.Tensor, source: int) -> dist.Work | None:
        """Start to fill `into` with a message. None if it is empty."""
        return self._message(dist.irecv, into, group_src=source % self.size)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send `tensor` and return when it may be overwritten."""
        self._message(dist.send, tensor, group_dst=to % self.size)

    def recv(self, into: torch.Tensor, source: int) -> torch.Tensor:
        """Wait for a message and return `into`, filled."""
        self._message(dist.recv, into, group_src=source % self.size)
        return into

    def _message(self, call: Callable[..., Any], tensor: torch.Tensor, **peer: int) -> Any:
        """What a function of torch gives for a message; None for an empty one."""
        if not tensor.numel():
            return None
        self.require_sendable(tensor)
        return call(as_bytes(tensor), group=self.group, tag=TAG, **peer)

    def expect(self, into: torch.Tensor, source: int) -> Arrival:
        """Announce that `into` is ready for a message; `exchange` waits for it.

        Messages of one sender fill its announced tensors in the order of the announcements.
        """
        arrival = Arrival(into, source % self.size)
        if not self._batches(into):
            arrival.work = self.irecv(into, source)
            self._announced = arrival.work is not None or self._announced
        return arrival

    def exchange(self, outgoing: torch.Tensor, to: int, arrival: Arrival) -> torch.Tensor:
        """Send `outgoing`, wait for `arrival` meanwhile, return what arrived."""
        if self._batches(arrival.into):
            self._exchange_in_a_batch(outgoing, to % self.size, arrival)
            return arrival.into
        if self._announced:
            self._let_announcements_out()
        sending = self.isend(outgoing, to)
        wait_for([arrival.work, sending])
        return arrival.into

    def require_sendable(self, tensor: torch.Tensor) -> None:
        """Raises ValueError if the backend has no messages for the tensor's device."""
        # gloo would read a GPU's memory as the CPU's, and end the process: "Bad address".
        if tensor.is_cuda and "cuda:gloo" in self.backends:
            raise ValueError(
                "gloo sends no message from a GPU's memory: make the process group with NCCL, "
                "or move the tensors to the CPU"
            )

    def _let_announcements_out(self) -> None:
        # An announcement is itself a small message to the sender, on the connection that the sender
        # is about to use. gloo's network thread spins while another thread of its process holds
        # that connection, which costs a time slice where there are more ranks than cores. The
        # pause makes a ring of 4 ranks on 2 cores about a tenth faster.
        self._announced = False
        if "gloo" in self.backends:
            time.sleep(PAUSE)

    def _batches(self, tensor: torch.Tensor) -> bool:
        # NCCL queues on the device: "send, then receive" on every rank would wait for ever, unless
        # the two form one batch.
        return tensor.is_cuda and "nccl" in self.backends

    def _exchange_in_a_batch(self, outgoing: torch.Tensor, to: int, arrival: Arrival) -> None:
        batch = []
        if arrival.into.numel():
            incoming = as_bytes(arrival.into)
            batch.append(
                dist.P2POp(dist.irecv, incoming, group=self.group, group_peer=arrival.source)
            )
        if outgoing.numel():
            batch.append(
                dist.P2POp(dist.isend, as_bytes(outgoing), group=self.group, group_peer=to)
            )
        wait_for(dist.batch_isend_irecv(batch) if batch else [])

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
