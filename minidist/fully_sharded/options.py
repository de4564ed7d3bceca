"""What a unit is told. Lesson: fully_sharded"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Placement, Replicate, Shard


@dataclass(frozen=True, eq=False)
class Options:
    """What a unit is told. The ranks of `groups[0]` have a shard each; with hybrid sharding,
    those of `groups[1]` have the same one."""

    mesh: DeviceMesh
    groups: tuple[dist.ProcessGroup, ...]
    precision: MixedPrecisionPolicy
    reshards: bool | None  # after forward. None: if it is not the root
    offloads: bool
    ignored: frozenset[nn.Parameter] = frozenset()

    @property
    def placements(self) -> list[Placement]:
        """Of every parameter."""
        return [Replicate()] * (self.mesh.ndim - 1) + [Shard(0)]
