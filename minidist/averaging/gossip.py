"""Gossip: a mean with one neighbour, and no meeting of all (lesson: beyond_gradients)."""

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from minidist.averaging.averaging_optimizer import AveragingOptimizer
from minidist.averaging.flat_mean import pack, unpack


class Gossip(AveragingOptimizer):
    """Every `period` steps a rank sends its parameters to one neighbour, receives those of another,
    and takes the mean of these and its own.

        optimizer = md.averaging.Gossip(optimizer)

    The neighbour is 1 rank further at the first meeting, 2 at the next, then 4, … below the world
    size, and 1 again. So what a rank has learned reaches all in ⌈lg N⌉ meetings, where N is the
    world size; and if N is a power of two, replicas that take no steps are then equal. No meeting
    changes the mean over all ranks: each replica goes in twice, by a half. A meeting is one message
    of n bytes. An all_reduce by a ring is 2 (N-1) messages, one after the other, with 2 (N-1)/N n
    bytes together; and one slow rank keeps all others waiting.

    See `AveragingOptimizer` for the rest. Lian et al. 2017, "Can Decentralized Algorithms
    Outperform Centralized Algorithms?", arXiv 1705.09056; these neighbours: Assran et al. 2019,
    "Stochastic Gradient Push", arXiv 1811.10792. Lesson: beyond_gradients.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        period: int = 1,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(optimizer, period, process_group)

    def after_step(self) -> None:
        """At the end of a period: the mean with a neighbour."""
        ranks = dist.get_world_size(self.process_group)
        if self.steps % self.period or ranks == 1:
            return
        meeting = self.steps // self.period - 1
        distance = 2 ** (meeting % (ranks - 1).bit_length())
        me = dist.get_rank(self.process_group)
        ahead, behind = (me + distance) % ranks, (me - distance) % ranks
        mine = pack(self.parameters)
        theirs = [torch.empty_like(flat) for flat in mine]
        works: list[dist.Work] = []
        for sent, received in zip(mine, theirs, strict=True):
            # One batch: with NCCL "send, then receive" on every rank would wait for ever.
            send = dist.P2POp(dist.isend, sent, group=self.process_group, group_peer=ahead)
            receive = dist.P2POp(dist.irecv, received, group=self.process_group, group_peer=behind)
            works += dist.batch_isend_irecv([send, receive])
        for work in works:
            work.wait()
        for flat, other in zip(mine, theirs, strict=True):
            flat.lerp_(other, 0.5)
        for own, mean in zip(self.parameters, unpack(mine, self.parameters), strict=True):
            own.copy_(mean)  # two that share memory get it once
