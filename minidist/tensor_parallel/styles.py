"""What a plan can say of a module: torch's styles, short names for them, and a few of our own.

"columns", "rows" and "vocabulary" are torch's ColwiseParallel and RowwiseParallel, and "copied" is
its SequenceParallel; but they know themselves what `sequence_parallel` asks for.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel

from minidist.common.groups import require_group
from minidist.tensor_parallel.block import SequenceParallel
from minidist.tensor_parallel.layer import ParallelLayer, require_multiple
from minidist.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelLinear,
)
from minidist.tensor_parallel.operators import Group, scatter_to_group
from minidist.tensor_parallel.qkv import QKVParallelLinear


@dataclass(frozen=True)
class Where:
    """The ranks that share the model. mesh: if parameters are to be DTensors."""

    group: Group
    ranks: int
    device_type: str
    sequence_parallel: bool
    mesh: DeviceMesh | None = None

    @cached_property
    def any_mesh(self) -> DeviceMesh:
        """For what takes a mesh also where parameters are plain."""
        if self.mesh is not None:
            return self.mesh
        return DeviceMesh.from_group(require_group(self.group, "split"), self.device_type)


class Style:
    """What a plan says of one module: which is to stand in its place, and how it changes."""

    def make(self, module: Any, where: Where) -> nn.Module:
        """Raises ValueError or TypeError if it cannot be split so. Changes nothing yet."""
        return module

    def change(self, module: Any, where: Where) -> None:
        """Changes the module in place."""


@dataclass(frozen=True)
class Layer(Style):
    """A layer of torch becomes one that is split, of the first of `kinds` that fits. options: those
    of its constructor. as_dtensor: its output, features of which each rank has some, says so."""

    name: str
    kinds: tuple[type[ParallelLayer], ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    as_dtensor: bool = False

    def make(self, module: Any, where: Where) -> nn.Module:
        kind = next((k for k in self.kinds if type(module).forward is k.dense.forward), None)
        names = [name for name, _ in chain(module.named_parameters(), module.named_buffers())]
        more = sorted({*names, *module.state_dict()} - {"weight", "bias"})
        if kind is None or more:
            known = " or an ".join(f"nn.{k.dense.__name__}" for k in self.kinds)
            found = type(module).__name__ + (f" with {', '.join(more)}" if kind and more else "")
            raise TypeError(f"{self.name!r} splits an {known}, not a {found}")
        options = dict(sequence_parallel=where.sequence_parallel) | dict(self.options)
        own = kind.from_dense(module, where.group, **options).train(module.training)
        if where.mesh is not None:
            own.placement("weight")  # raises if there is none
        if self.as_dtensor:
            mesh = where.mesh
            if mesh is None:
                raise TypeError("use_local_output=False is for parallelize_module")
            own.register_forward_hook(lambda layer, _, y: _features(y, layer.out_features, mesh))
        return own


def _features(y: torch.Tensor, out_features: int, mesh: DeviceMesh) -> DTensor:
    shape = torch.Size((*y.shape[:-1], out_features))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)


@dataclass(frozen=True)
class Heads(Style):
    names: tuple[str, ...]

    def make(self, module: Any, where: Where) -> nn.Module:
        for name in self.names:
            number = getattr(module, name, None)
            if not isinstance(number, int):
                raise ValueError(f"a {type(module).__name__} has no number {name!r} to divide")
            require_multiple(number, where.ranks, f"{name} over {where.ranks} ranks")
        return module

    def change(self, module: Any, where: Where) -> None:
        for name in self.names:
            setattr(module, name, getattr(module, name) // where.ranks)


class HeadsOfConfig(Heads):
    """Numbers in the module's config, which stay as they are: its forward takes all heads that its
    layers give, and the number of tokens from its input."""

    def make(self, module: Any, where: Where) -> nn.Module:
        super().make(getattr(module, "config", module), where)
        if where.sequence_parallel:
            raise ValueError("it takes the number of tokens from its input: no sequence_parallel")
        return module

    def change(self, module: Any, where: Where) -> None:
        pass


@dataclass(frozen=True)
class Copied(Style):
    """always: also if there is no part of the sequence for each rank."""

    always: bool

    def make(self, module: Any, where: Where) -> nn.Module:
        wanted = self.always or where.sequence_parallel
        return SequenceParallel(module, where.group) if wanted else module


@dataclass(frozen=True)
class Scattered(Style):
    """With `sequence_parallel`, each rank takes its part of the output (…, T, C), along T."""

    def change(self, module: Any, where: Where) -> None:
        if where.sequence_parallel:
            module.register_forward_hook(lambda _, __, y: scatter_to_group(y, -2, where.group))


@dataclass(frozen=True)
class Prepared(Style):
    """What a module takes or gives is to lie otherwise on the ranks: torch's PrepareModuleInput and
    PrepareModuleOutput, which do it by hooks."""

    torchs: tuple[parallel.ParallelStyle, ...]

    def change(self, module: Any, where: Where) -> None:
        for style in self.torchs:
            if isinstance(style, parallel.PrepareModuleInput):
                style = copy.copy(style)
                style.use_local_output = True  # our layers compute with plain tensors
            parallel.parallelize_module(module, where.any_mesh, style)


def qkv(heads: int, kv_heads: int | None = None) -> Style:
    """One nn.Linear that gives all queries, then all keys, then all values, becomes a
    `QKVParallelLinear`. Lesson: feature_splitting.

    heads, kv_heads: how many there are in the whole layer; fewer kv_heads in `MixedParallel` only.
    """
    return Layer("qkv", (QKVParallelLinear,), dict(heads=heads, kv_heads=kv_heads))


def heads(*names: str) -> Style:
    """The module's attributes of these names, numbers such as of heads, are divided by the number
    of ranks. Lesson: feature_splitting."""
    return Heads(names)


STYLES: dict[str, Style] = {
    "columns": Layer("columns", (ColumnParallelLinear,)),
    "rows": Layer("rows", (RowParallelLinear,)),
    "vocabulary": Layer("vocabulary", (VocabParallelEmbedding, VocabParallelLinear)),
    "copied": Copied(always=True),
    "sequence": Copied(always=False),
    "scattered": Scattered(),
}


def style_of(pattern: str, value: Any) -> Style:
    """The style that a plan means. Raises ValueError or TypeError for one that there is not."""
    if isinstance(value, Style):
        return value
    if isinstance(value, str):
        if value not in STYLES:
            known = ", ".join(STYLES)
            raise ValueError(f"the plan's {pattern!r}: no style {value!r}; there are {known}")
        return STYLES[value]
    if isinstance(value, parallel.ParallelStyle) and (style := _of_torch(value)):
        return style
    raise TypeError(
        f"the plan's {pattern!r}: minidist has nothing for {value}. It knows {', '.join(STYLES)}, "
        "qkv(...), heads(...), and torch's styles, whose layers have inputs and outputs replicated "
        "or sharded along the features or dimension 1"
    )


def _of_torch(value: Any) -> Style | None:
    """Our style for one of torch's, if there is one for its layouts."""
    whole, tokens, features = Replicate(), Shard(1), Shard(-1)
    if isinstance(value, parallel.SequenceParallel):
        return STYLES["copied"] if value.sequence_sharding == (tokens,) else None
    if isinstance(value, parallel.PrepareModuleInputOutput):
        return Prepared((value.prepare_module_input, value.prepare_module_output))
    if isinstance(value, parallel.PrepareModuleInput | parallel.PrepareModuleOutput):
        return Prepared((value,))
    if not isinstance(value, parallel.ColwiseParallel | parallel.RowwiseParallel):
        return None
    (into,), (out,), plain = value.input_layouts, value.output_layouts, value.use_local_output
    if isinstance(value, parallel.RowwiseParallel):
        if into not in (whole, features) or out not in (whole, tokens) or not plain:
            return None
        rows = (RowParallelLinear,) if into == features else (VocabParallelEmbedding,)
        return Layer("RowwiseParallel", rows, dict(sequence_parallel=out == tokens))
    if into not in (whole, tokens) or out not in (whole, features) or (out == whole and not plain):
        return None
    options = dict(sequence_parallel=into == tokens, gather_output=out == whole)
    # A DTensor is for loss_parallel, which takes logits of a vocabulary of any size.
    columns = (ColumnParallelLinear,) if plain else (VocabParallelLinear,)
    return Layer("ColwiseParallel", columns, options, as_dtensor=not plain)
