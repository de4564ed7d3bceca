"""Messages between neighbouring ranks: sends that are in flight, and receives that are awaited.

A message begins at its place in the rank's list, on both sides. So what `validate` finds out from
the lists is true of the messages, even where two ranks have one queue for both directions, as with
NCCL. A send is in flight while its rank goes on; a receive is waited for when it is needed.
"""

from collections import defaultdict, deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from minidist.collectives.peers import TAG, Peers, as_bytes
from minidist.pipeline.outlines import TensorSpec

Works = list[dist.Work | None]
Travelling = tuple[list[torch.Tensor], Works]  # tensors on their way, and how to wait for them
IN_FLIGHT = 2  # messages to one rank: as long as they travel, they take memory


class Transfers:
    """This rank's messages of one step. Tensors are on `device`."""

    def __init__(self, peers: Peers, device: torch.device) -> None:
        self._peers, self._device = peers, device
        self._leaving: dict[int, deque[Travelling]] = defaultdict(deque)

    def send(
        self, tensors: Sequence[torch.Tensor | None] | None, specs: Sequence[TensorSpec], stage: int
    ) -> None:
        """Send tensors that look like `specs` to the rank of a stage. None stands for zeros, as a
        rank sends them that has failed, so that no other waits for ever."""
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
        """Let tensors come in that look like `specs`, from the rank of a stage."""
        group, source = self._peers.group, stage % self._peers.size
        tensors = [spec.empty(self._device) for spec in specs]
        works = [dist.irecv(x, group=group, group_src=source, tag=TAG) for x in _bytes(tensors)]
        return tensors, works

    def take(self, coming: Travelling) -> list[torch.Tensor]:
        """Wait for tensors that are expected."""
        _wait(coming[1])
        return coming[0]

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for leaving in self._leaving.values():
            for _, works in leaving:
                _wait(works)


def _bytes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """An empty tensor does not travel."""
    return [as_bytes(x.view(-1)) for x in tensors if x.numel()]


def _wait(works: Works) -> None:
    for work in works:
        assert work is not None  # which it is for ranks outside the group only
        work.wait()
