"""One parameter of a unit: a DTensor that the optimizer trains, in whose place modules compute with
the full parameter while the unit is gathered. Lesson: fully_sharded
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from minidist.common.dtensor import relist
from minidist.common.materialize import Place

ON_META = (
    "is on the device meta: call to_empty(device=...) of the sharded model, and fill its parameters"
)


@dataclass(eq=False)
class ShardedParameter:
    """One parameter of a unit. It is tied if it has several `names` and `places`."""

    names: tuple[str, ...]
    places: tuple[Place, ...]
    sharded: nn.Parameter  # what the optimizer trains: a DTensor, its rows a view of the shard
    in_shard: slice  # where these are, with the padding of the last ranks
    grad: torch.Tensor | None = None  # of this rank, whole, while a backward pass goes on
    contributes = False  # to a gradient that is not reduced, more than zeros
    mean: torch.Tensor | None = None  # of all ranks, this rank's rows: when it is reduced
    storages: Any = None  # it has these while nobody gives it others

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows."""
        local: torch.Tensor = self.sharded._local_tensor  # type: ignore[attr-defined]
        return local

    def __post_init__(self) -> None:
        self.settle()

    def settle(self) -> None:
        """Remember which memory it has."""
        self.storages = self._storages()

    def problem(self) -> str:
        """Why the modules, or the optimizer, no longer have this parameter, if that is so."""
        if any(m._parameters.get(name) is not self.sharded for m, name in self.places):
            return (
                "has been replaced since it was sharded, and its shards are what is gathered: "
                "write into them, or change the module and then shard it"
            )
        if self.local.is_meta:
            return ON_META
        # p.data = … changes nothing of a DTensor but a storage that nobody reads.
        if any(a._cdata != b._cdata for a, b in zip(self.storages, self._storages(), strict=True)):
            return (
                "has been given other memory, by p.data = ..., or since a module within the unit "
                "was moved alone. Its shard is what is gathered: write into it, p.copy_(...), and "
                "move whole units"
            )
        return ""

    def _storages(self) -> tuple[Any, Any]:
        return self.local.untyped_storage(), self.sharded.untyped_storage()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | dict.fromkeys(("storages", "grad", "mean"))

    def to_unsharded(self, view: torch.Tensor) -> None:
        """Have the modules compute with this. Python looks there before it asks nn.Module: so
        `parameters()` stays as it is."""
        for module, name in self.places:
            module.__dict__[name] = view
            relist(module)

    def to_sharded(self) -> None:
        """Have them compute with the DTensor again."""
        for module, name in self.places:
            module.__dict__.pop(name, None)
            relist(module)

    def set_on_modules(self, parameter: nn.Parameter) -> None:
        """Make this the modules' parameter."""
        for module, name in self.places:
            module._parameters[name] = parameter
        self.to_sharded()


def rows_of(whole: torch.Tensor, sharded: torch.Tensor) -> DTensor:
    """This rank's rows of a tensor like the parameter, the same on every rank. No message."""
    like: Any = sharded
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def partial_of(parameter: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of a gradient that no pass has reduced, whole, times 1 / ranks."""
    grad: Any = parameter.grad
    return grad._local_tensor if grad is not None and grad.placements[-1].is_partial() else None
