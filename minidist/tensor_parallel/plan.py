"""How a model of any make is split by features: a plan says it, name by name.

    {"layers.*.attention": heads("n_heads", "n_kv_heads"),
     "layers.*.attention.[qkv]": "columns", "layers.*.attention.out": "rows",
     "layers.*.mlp.up": "columns", "layers.*.mlp.down": "rows",
     "embedding": "vocabulary", "head": "vocabulary"}

    "columns", "rows"   an nn.Linear becomes a `ColumnParallelLinear`, a `RowParallelLinear`
    qkv(heads)          one for queries, keys and values becomes a `QKVParallelLinear`
    "vocabulary"        an nn.Embedding, or the nn.Linear of the logits, is split by tokens
    heads(name, …)      numbers that the module has as attributes, such as of heads, are divided
                        by that of ranks, so that its `forward` counts this rank's
    "copied"            what is replicated between columns and rows, such as a norm of each head:
                        its gradients are summed over the ranks
    "sequence"          what is replicated elsewhere, such as a norm: "copied", where it sees a
                        part of the tokens on each rank, with `sequence_parallel`
    "scattered"         its output (…, T, C) is cut along T, with `sequence_parallel`

`*` stands for any part of a name. What runs between columns and rows stays as it is, and sees this
rank's features only. What no plan has named is replicated. Lesson: feature_splitting.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch.distributed as dist
from torch import nn

from minidist.tensor_parallel.layers import (
    ColumnParallelLinear,
    ParallelLayer,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelLinear,
    local,
    require_multiple,
)
from minidist.tensor_parallel.operators import Group, copy_to_group, scatter_to_group


@dataclass(frozen=True)
class Where:
    """The ranks that share the model. as_dtensors: its parameters are to be such."""

    group: Group
    sequence_parallel: bool
    as_dtensors: bool


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
    of its `from_dense`."""

    name: str
    kinds: tuple[type[ParallelLayer], ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self, module: Any, where: Where) -> nn.Module:
        kind = next((k for k in self.kinds if type(module).forward is k.dense.forward), None)
        more = sorted(module.state_dict().keys() - {"weight", "bias"})
        if kind is None or more:
            known = " or an ".join(f"nn.{k.dense.__name__}" for k in self.kinds)
            found = type(module).__name__ + (f" with {', '.join(more)}" if more else "")
            raise TypeError(f"{self.name!r} splits an {known}, not a {found}")
        options = dict(sequence_parallel=where.sequence_parallel, **self.options)
        own = kind.from_dense(module, where.group, **options)
        if where.as_dtensors:
            own.placement("weight")  # raises if there is none
        return own


@dataclass(frozen=True)
class Heads(Style):
    """Numbers of the module are divided by that of ranks."""

    names: tuple[str, ...]

    def make(self, module: Any, where: Where) -> nn.Module:
        ranks = dist.get_world_size(where.group)
        for name in self.names:
            number = getattr(module, name, None)
            if not isinstance(number, int):
                raise ValueError(f"a {type(module).__name__} has no number {name!r} to divide")
            require_multiple(number, ranks, f"{name} over {ranks} ranks")
        return module

    def change(self, module: Any, where: Where) -> None:
        for name in self.names:
            setattr(module, name, getattr(module, name) // dist.get_world_size(where.group))


@dataclass(frozen=True)
class Copied(Style):
    """A replicated module of which each rank makes something of its own: its weights go through
    `copy_to_group`. always: also if there is no part of the sequence for each rank."""

    always: bool

    def change(self, module: Any, where: Where) -> None:
        if self.always or where.sequence_parallel:
            for part in module.modules():
                compute_with(part, lambda own: copy_to_group(local(own), where.group))


@dataclass(frozen=True)
class Scattered(Style):
    """With `sequence_parallel`, each rank takes its part of the output (…, T, C), along T."""

    def change(self, module: Any, where: Where) -> None:
        if where.sequence_parallel:
            module.register_forward_hook(lambda _, __, y: scatter_to_group(y, -2, where.group))


def compute_with(module: nn.Module, view: Callable[[Any], Any]) -> None:
    """Have a module find, while its forward runs, in the place of each parameter what `view` makes
    of it. Of two views, the one that is registered last comes first."""

    # Where Python looks before it asks nn.Module, so `parameters()` stays as it is; and where
    # FullyShardedDataParallel puts full parameters.
    def show(module: nn.Module, _: Any) -> None:
        own, names = vars(module), [n for n, p in module._parameters.items() if p is not None]
        before = {name: own[name] for name in names if name in own}
        own.setdefault("_shown", []).append((names, before))
        own.update({name: view(getattr(module, name)) for name in names})

    def hide(module: nn.Module, *_: Any) -> None:
        names, before = vars(module)["_shown"].pop()
        for name in names:
            vars(module).pop(name, None)
        vars(module).update(before)

    module.register_forward_pre_hook(show, prepend=True)
    module.register_forward_hook(hide, always_call=True)


STYLES: dict[str, Style] = {
    "columns": Layer("columns", (ColumnParallelLinear,)),
    "rows": Layer("rows", (RowParallelLinear,)),
    "vocabulary": Layer("vocabulary", (VocabParallelEmbedding, VocabParallelLinear)),
    "copied": Copied(always=True),
    "sequence": Copied(always=False),
    "scattered": Scattered(),
}


def qkv(heads: int, kv_heads: int | None = None) -> Style:
    """One nn.Linear that gives all queries, then all keys, then all values, becomes a
    `QKVParallelLinear`. Lesson: feature_splitting.

    heads, kv_heads: how many there are in the whole layer; fewer kv_heads by `split` only.
    """
    return Layer("qkv", (QKVParallelLinear,), dict(heads=heads, kv_heads=kv_heads))


def heads(*names: str) -> Style:
    """The module's attributes of these names, numbers such as of heads, are divided by the number
    of ranks. Lesson: feature_splitting."""
    return Heads(names)


def transformer_plan(model: Any) -> dict[str, Any]:
    """The plan for a `zoo.Transformer`. Lesson: sequence_parallel."""
    return {
        "tokens": "vocabulary",
        "positions": "scattered",
        "blocks.*": heads("heads"),
        "blocks.*.norm*": "sequence",
        "blocks.*.qkv": qkv(model.blocks[0].heads),
        "blocks.*.out": "rows",
        "blocks.*.mlp.0": "columns",
        "blocks.*.mlp.2": "rows",
        "norm": "sequence",
        "head": "vocabulary",
    }


def split_by(model: nn.Module, plan: Mapping[str, Any], where: Where) -> None:
    """Split a model in place, by a plan. Raises ValueError or TypeError, and changes nothing, if
    the model cannot be split so."""
    styles = _resolve(model, plan)
    made: dict[nn.Module, nn.Module] = {}  # what stands in a module's place, wherever that is
    for module, (name, style) in styles.items():
        if style is STYLES["columns"] and name.endswith("qkv"):
            raise ValueError(f"{name}: columns cut through queries, keys and values: take qkv(...)")
        try:
            made[module] = style.make(module, where)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None
    if made.get(model, model) is not model:
        raise TypeError("the plan's '': the model itself cannot be replaced. Name its parts")
    _tie(model, made)
    for module, (_, style) in styles.items():
        style.change(module, where)
    for parent in list(model.modules()):
        if isinstance(parent, nn.TransformerEncoderLayer):
            # Evaluated, it would read the weights of its parts, this rank's, and not call them.
            parent.activation_relu_or_gelu = 0
        for name, child in parent._modules.items():
            if child in made:
                setattr(parent, name, made[child])


def _resolve(model: nn.Module, plan: Mapping[str, Any]) -> dict[nn.Module, tuple[str, Style]]:
    """A name and the style of each module that the plan names. Raises ValueError for a style that
    there is not, a pattern that matches nothing, and two styles of one module."""
    styles: dict[nn.Module, tuple[str, Style]] = {}
    for pattern, value in plan.items():
        style = STYLES.get(value) if isinstance(value, str) else value
        if not isinstance(style, Style):
            known = ", ".join(STYLES)
            raise ValueError(
                f"the plan's {pattern!r}: no style {value!r}; there are {known}, "
                "qkv(...) and heads(...)"
            )
        named = model.named_modules(remove_duplicate=False)
        matched = [each for each in named if _matches(each[0], pattern)]
        if not matched:
            raise ValueError(f"the plan's {pattern!r} matches no module")
        for name, module in matched:
            other, known_style = styles.setdefault(module, (name, style))
            if known_style != style:
                raise ValueError(f"{other} and {name} are one module, with two styles in the plan")
    return styles


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    same_length = bool(name) == bool(pattern) and len(parts) == len(wanted)  # "": the model itself
    return same_length and all(map(fnmatch, parts, wanted))


def _tie(model: nn.Module, made: Mapping[nn.Module, nn.Module]) -> None:
    """What is one parameter stays one. Raises ValueError if its layers are not split alike."""
    first: dict[nn.Parameter, tuple[str, ParallelLayer | None, str]] = {}
    for name, module in model.named_modules():
        own = made.get(module)
        cut = own if isinstance(own, ParallelLayer) else None
        for key, parameter in module.named_parameters(recurse=False):
            other, there, its_key = first.setdefault(parameter, (name, cut, key))
            if cut is there:
                continue
            if cut is None or there is None or _shard(cut, key) != _shard(there, its_key):
                raise ValueError(
                    f"{other}.{its_key} and {name}.{key} are one parameter, and the plan does not "
                    "split both in the same way"
                )
            setattr(cut, key, getattr(there, its_key))


def _shard(layer: ParallelLayer, name: str) -> Any:
    """Which part of a parameter a layer holds."""
    if name not in layer.sharded:
        return None
    return layer.sharded[name], layer.indices(layer.rank).tolist()
