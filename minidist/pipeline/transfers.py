"""Messages between neighbouring ranks: sends and receives that do not block.

Both sides post a message at its place in their list. So what `validate` proves of the lists holds
for the messages, even where two ranks share one queue for both directions, as with NCCL. A rank
does not wait for a send, and waits for a receive only when it needs the tensors.
"""

from collections import defaultdict, deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from minidist.collectives.peers import TAG, Peers, as_bytes
from minidist.pipeline.specs import TensorSpec

Works = list[dist.Work | None]
Travelling = tuple[list[torch.Tensor], Works]  # tensors, and handles to wait for
IN_FLIGHT = 2  # messages to one rank: each holds its tensors until it has arrived


class Transfers:
    """This rank's messages of one step. Tensors are on `device`."""

    def __init__(self, peers: Peers, device: torch.device) -> None:
        self._peers, self._device = peers, device
        self._leaving: dict[int, deque[Travelling]] = defaultdict(deque)

    def send(
        self, tensors: Sequence[torch.Tensor | None] | None, specs: Sequence[TensorSpec], stage: int
    ) -> None:
        """Send tensors of these specs to the rank of a stage. None stands for zeros, sent by a rank
        that has failed, so that no other waits for ever."""
        whole = [
            spec.empty(self._device).zero_() if x is None else x.contiguous()
            for spec, x in zip(specs, tensors or [None] * len(specs), strict=True)
        ]
        group, to = self._peers.group, stage % self._peers.size
        leaving = self._leaving[to]
        if len(leaving) == IN_FLIGHT:
            _wait(leaving.popleft()[1])
        works = [dist.isend(x, group=group, group_dst=to, tag=TAG) for x in _bytes(whole)]
        leaving.append((whole, works))

    def expect(self, specs: Sequence[TensorSpec], stage: int) -> Travelling:
        """Post the receive of tensors of these specs, from the rank of a stage."""
        group, source = self._peers.group, stage % self._peers.size
        tensors = [spec.empty(self._device) for spec in specs]
        works = [dist.irecv(x, group=group, group_src=source, tag=TAG) for x in _bytes(tensors)]
        return tensors, works

    def take(self, coming: Travelling) -> list[torch.Tensor]:
        """Wait for tensors whose receive is posted."""
        _wait(coming[1])
        return coming[0]

    def finish(self) -> None:
        """Wait for all sends."""
        for leaving in self._leaving.values():
            for _, works in leaving:
                _wait(works)


def _bytes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors as bytes; empty ones are not sent."""
    return [as_bytes(x.view(-1)) for x in tensors if x.numel()]


def _wait(works: Works) -> None:
    for work in works:
        assert work is not None  # None: this rank is not in the group
        work.wait()
