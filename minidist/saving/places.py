"""Where each parameter of a model is on this rank, by every strategy (lesson: scaling_out).

    strategy                        what a rank has of a parameter
    bare, DDP, ZeRO 1 and 2         all of it
    fully sharded                   rows: a DTensor
    tensor parallel                 features, and of `parallelize_module`'s a DTensor
    pipeline                        all, or nothing
    mixed                           rows of features, or nothing

Of an optimizer's states it has the same, and with ZeRO a span.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from minidist.common.tensors_in import local_of
from minidist.mixed import MixedParallel
from minidist.saving.boxes import Box, Boxed, dtensor_boxes, span_boxes, spread, whole_box
from minidist.tensor_parallel.layers import ParallelLayer
from minidist.zero import ZeroRedundancyOptimizer

EXTRA_STATE = "_extra_state"  # what a module's get_extra_state gives: a value, be it a tensor


@dataclass(eq=False)
class Place:
    """What this rank has of a tensor of the bare module, which may have several names."""

    own: torch.Tensor
    shape: torch.Size  # of the whole
    cut: tuple[int, torch.Tensor] | None = None  # of the whole, `own` is these indices along a dim
    by_layer: bool = False  # `own` is a DTensor of what `cut` says, not of a part of it
    names: list[str] = field(default_factory=list)

    @property
    def local(self) -> torch.Tensor:
        """This rank's own elements: `own`, or what it has of it as a DTensor."""
        return local_of(self.own)

    def boxes(self, span: slice | None = None) -> list[Box]:
        """Of the whole; of a `span` of what the rank has, if one is given."""
        if isinstance(self.own, DTensor) and not self.by_layer:
            found = dtensor_boxes(self.own)
        else:
            found = whole_box(self.local.shape) if span is None else span_boxes(self.own, span)
        return found if self.cut is None else spread(found, *self.cut)

    def boxed(self) -> Boxed:
        """The tensor itself. Buffers, such as a batch norm's, may be others on each rank."""
        is_parameter = isinstance(self.own, nn.Parameter)
        return Boxed(self.local, self.shape, self.boxes(), same=is_parameter)


def places_of(model: nn.Module) -> tuple[list[Place], dict[str, tuple[str, Any]]]:
    """Of each parameter and buffer in the model's state its place, by its names in the bare model,
    which is not compiled; and what else is in it, such as a tensor that a hook has made for the
    state, with its name here.

    No rank waits for another. Raises TypeError for what a hook has made of shards.
    """
    bare = _bare(model)
    named = dict(bare.state_dict(keep_vars=True))  # first: a hook before it may reshard
    cuts, own = dict(_cuts(model)), {*model.parameters(), *model.buffers()}
    shards = {name for name, p in bare.named_parameters() if p in cuts}
    found: dict[torch.Tensor, Place] = {}
    others: dict[str, tuple[str, Any]] = {}
    for name, value in named.items():
        known = name.replace("_orig_mod.", "")  # of a compiled module
        # To read into a tensor that is not the model's own would change nothing.
        is_own = isinstance(value, torch.Tensor) and value in own
        if not is_own or name.rpartition(".")[2] == EXTRA_STATE:
            if isinstance(value, DTensor) or name in shards:
                raise TypeError(
                    f"{name} is no parameter of the model but made of a rank's shard, by a hook "
                    "for its state: no other rank could read it. Save and load without the hook"
                )
            others[known] = name, value
            continue
        if value not in found:
            found[value] = _place(value, cuts.get(value))
        found[value].names.append(known)
    return list(found.values()), others


def without_ddp(model: Any) -> Any:
    """Torch's DistributedDataParallel names a state by `module.`; all other strategies do not. It
    may be in a compiled module."""
    model = model._modules.get("_orig_mod", model)
    return model.module if isinstance(model, TorchDDP) else model


def _bare(model: nn.Module) -> Any:
    bare = without_ddp(model)
    return bare.module if isinstance(bare, MixedParallel) else bare


def _place(own: torch.Tensor, cut: tuple[int, ParallelLayer] | None) -> Place:
    if cut is None:
        return Place(own, own.shape)
    dim, layer = cut
    shape = list(own.shape)
    shape[dim] = sum(len(layer.indices(rank)) for rank in range(layer.world_size))
    of_layer = isinstance(own, DTensor) and own.device_mesh.size() == layer.world_size
    by_layer = of_layer and own.shape[dim] == shape[dim]  # else rows of its shard, fully sharded
    return Place(own, torch.Size(shape), (dim, layer.indices(layer.rank)), by_layer)


def _cuts(model: nn.Module) -> Iterator[tuple[torch.Tensor, tuple[int, ParallelLayer]]]:
    for layer in model.modules():
        if isinstance(layer, ParallelLayer):
            for name, dim in layer.sharded.items():
                own = layer._parameters.get(name)
                if own is not None:
                    yield own, (dim, layer)


# ---- optimizers -------------------------------------------------------------------------------


@dataclass(eq=False)
class Trained:
    """A parameter of an optimizer: which it is, and what of it the states here are of."""

    number: int  # among the optimizer's parameters
    place: Place
    own: torch.Tensor
    boxes: list[Box]


def trained_by(optimizer: torch.optim.Optimizer, places: Sequence[Place]) -> list[list[Trained]]:
    """Of each group its parameters. Raises ValueError if one is not among the places."""
    by_tensor = {place.own: place for place in places}
    rows = optimizer.own if isinstance(optimizer, ZeroRedundancyOptimizer) else {}
    groups: list[list[Trained]] = []
    number = 0
    for group in optimizer.param_groups:
        groups.append([])
        for parameter in group["params"]:
            place = by_tensor.get(parameter)
            if place is None:
                raise ValueError(
                    "the optimizer has a parameter that is not the model's, or of which a hook "
                    "makes something else for the model's state"
                )
            own, boxes = place.local, place.boxes()
            if parameter in rows:
                own = rows[parameter]
                start = own.storage_offset() - parameter.storage_offset()
                boxes = place.boxes(slice(start, start + own.numel()))
            groups[-1].append(Trained(number, place, own, boxes))
            number += 1
    return groups
