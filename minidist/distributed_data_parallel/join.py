"""Ranks with different numbers of batches (lesson 4), by torch's `Join`."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from minidist.common.replicas import broadcast_state


class Shadow(JoinHook):
    """What a rank without batches does while others train `ddp`."""

    def __init__(self, ddp: Any) -> None:
        self._ddp = ddp

    def main_hook(self) -> None:
        """Answer the collectives of one forward and one backward pass."""
        if self._ddp._prepare(sync=False, active=False):
            self._ddp._reducer.answer()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the model of a rank that has trained until the end."""
        ddp, group = self._ddp, self._ddp.process_group
        rank = dist.get_rank(group) if is_last_joiner else -1
        last = torch.tensor([rank], device=ddp.join_device)
        dist.all_reduce(last, dist.ReduceOp.MAX, group)
        broadcast_state([*ddp.module.parameters(), *ddp.module.buffers()], group, int(last))
