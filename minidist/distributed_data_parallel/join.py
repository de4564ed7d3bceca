"""Ranks with different numbers of batches, by torch's `Join`. Lesson: distributed_data_parallel.

A rank whose batches are used up answers the collectives of those that still train, and in the end
takes their model. For that the ranks vote before each forward pass: who is there, and what is next.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from minidist.common.replicas import broadcast_state


class UnevenBatches(Joinable):
    """What `Join` asks of a DistributedDataParallel."""

    process_group: dist.ProcessGroup
    device: torch.device
    _divide_by_initial_world_size = True

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Train within this block when ranks have different numbers of batches, as in torch. The
        sum of the gradients is divided by the number of all ranks, or by that of the ranks that
        still train. Several modules: torch's `Join([...])`."""
        divide = {"divide_by_initial_world_size": divide_by_initial_world_size}
        return Join([self], enable, throw_on_early_termination, **divide)

    @property
    def join_device(self) -> torch.device:
        """For torch's `Join`: where its small messages live."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """For torch's `Join`."""
        return self.process_group

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch's `Join`."""
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return _Answering(self)

    def _vote(self, trains: bool, *wishes: bool) -> tuple[list[int], list[bool]]:
        """The ranks that still have batches, and which of the wishes one of them has. `trains`:
        whether this rank is among them. If not, it goes along with the others."""
        ranks = dist.get_world_size(self.process_group)
        votes = torch.zeros(ranks + len(wishes))
        if trains:
            votes[dist.get_rank(self.process_group)] = 1
            votes[ranks:] = torch.tensor(wishes)
        votes = votes.to(self.device)
        dist.all_reduce(votes, group=self.process_group)
        return votes[:ranks].nonzero().flatten().tolist(), (votes[ranks:] > 0).tolist()


class _Answering(JoinHook):
    """What a rank without batches does while others train `ddp`."""

    def __init__(self, ddp: Any) -> None:
        self._ddp = ddp

    def main_hook(self) -> None:
        """Answer the collectives of one forward and one backward pass, with zeros."""
        if self._ddp._begin_step(sync=False, trains=False):
            reducer = self._ddp._reducer
            for parameter in reducer.parameters:
                parameter.grad = None
            reducer.average(reducer.parameters)
            reducer.expect(sync=False)  # no backward pass comes here

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the model of a rank that has trained until the end."""
        ddp, group = self._ddp, self._ddp.process_group
        rank = dist.get_rank(group) if is_last_joiner else -1
        last = torch.tensor([rank], device=ddp.device)
        dist.all_reduce(last, dist.ReduceOp.MAX, group)
        broadcast_state(ddp._common_state(), group, int(last))
