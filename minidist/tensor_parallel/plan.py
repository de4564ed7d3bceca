"""How a model of any make is split by features: a plan says it, name by name.

    {"layers.*.attention": heads("n_heads", "n_kv_heads"),
     "layers.*.attention.q": "columns", ..., "layers.*.attention.out": "rows"}

A style puts a layer of this lesson in the place of one of torch's. What runs between a layer that
is split by columns and the next that is split by rows stays as it is, and sees this rank's features
only: so attention must count this rank's heads, and a weight that is replicated there ("copied")
gets a gradient that is summed over the ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.parallel import SequenceParallel as TorchSequenceParallel
from torch.distributed.tensor.placement_types import Replicate, Shard

from minidist.tensor_parallel.block import QKVParallelLinear, SequenceParallel
from minidist.tensor_parallel.layer import ParallelLayer, require_multiple
from minidist.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from minidist.tensor_parallel.operators import Group, scatter_to_group
from minidist.tensor_parallel.vocabulary import VocabParallelEmbedding, VocabParallelLinear


@dataclass(frozen=True)
class Where:
    """The ranks that share the model."""

    group: Group
    ranks: int
    sequence_parallel: bool


class Style:
    """What a plan says of one module: which is to stand in its place, and how it changes."""

    def make(self, module: Any, where: Where) -> nn.Module:
        """Raises ValueError or TypeError if it cannot be split so. Changes nothing yet."""
        return module

    def change(self, module: Any, where: Where) -> None:
        """Changes the module in place."""


Kinds = Mapping[type[nn.Module], type[ParallelLayer]]


@dataclass(frozen=True)
class Layer(Style):
    """A layer of torch becomes one that is split. options: those of its constructor."""

    name: str
    kinds: Kinds
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self, module: Any, where: Where) -> nn.Module:
        kind = next((k for k in self.kinds if type(module).forward is k.forward), None)
        if kind is None or set(dict(module.named_parameters())) - {"weight", "bias"}:
            known = " or an ".join(f"nn.{k.__name__}" for k in self.kinds)
            raise TypeError(f"{self.name!r} splits an {known}, not a {type(module).__name__}")
        options = dict(sequence_parallel=where.sequence_parallel) | dict(self.options)
        return self.kinds[kind].from_dense(module, where.group, **options).train(module.training)


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


@dataclass(frozen=True)
class Copied(Style):
    """always: also if there is no part of the sequence for each rank."""

    always: bool

    def make(self, module: Any, where: Where) -> nn.Module:
        wanted = self.always or where.sequence_parallel
        return SequenceParallel(module, where.group) if wanted else module


class Scattered(Style):
    def change(self, module: Any, where: Where) -> None:
        if where.sequence_parallel:
            module.register_forward_hook(lambda _, __, y: scatter_to_group(y, -2, where.group))


def qkv(heads: int, kv_heads: int | None = None) -> Style:
    """One nn.Linear that gives all queries, then all keys, then all values, becomes a
    `QKVParallelLinear`. Lesson: feature_splitting.

    heads, kv_heads: how many there are in the whole layer.
    """
    return Layer("qkv", {nn.Linear: QKVParallelLinear}, dict(heads=heads, kv_heads=kv_heads))


def heads(*names: str) -> Style:
    """The module's attributes of these names, numbers such as of heads, are divided by the number
    of ranks. Lesson: feature_splitting."""
    return Heads(names)


COLUMNS: Kinds = {nn.Linear: ColumnParallelLinear}
ROWS: Kinds = {nn.Linear: RowParallelLinear}
EMBEDDING: Kinds = {nn.Embedding: VocabParallelEmbedding}
VOCABULARY: Kinds = {**EMBEDDING, nn.Linear: VocabParallelLinear}
STYLES: dict[str, Style] = {
    "columns": Layer("columns", COLUMNS),
    "rows": Layer("rows", ROWS),
    "vocabulary": Layer("vocabulary", VOCABULARY),
    "copied": Copied(always=True),
    "sequence": Copied(always=False),
    "scattered": Scattered(),
}


def split_by(model: nn.Module, plan: Mapping[str, Any], where: Where) -> None:
    """Split a model in place, by a plan. See `parallelize`."""
    styles = _resolve(model, plan)
    made: dict[str, nn.Module] = {}
    by_module: dict[nn.Module, nn.Module] = {}  # a module with two names stays one
    for name, style in styles.items():
        module = model.get_submodule(name)
        if module not in by_module:
            try:
                by_module[module] = style.make(module, where)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{name}: {error}") from None
        made[name] = by_module[module]
    _tie(model, made)
    for name in sorted(styles, key=lambda name: -name.count(".")):  # parts before the whole
        module = model.get_submodule(name)
        if module in by_module:
            styles[name].change(module, where)
        if made[name] is not module:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, made[name])


def _tie(model: nn.Module, made: Mapping[str, nn.Module]) -> None:
    """What is one parameter stays one. Raises ValueError if its layers are not split alike."""
    first: dict[nn.Parameter, tuple[str, ParallelLayer | None, str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        own = made.get(name)
        cut = own if isinstance(own, ParallelLayer) else None
        for key, parameter in module.named_parameters(recurse=False):
            other, there, its_key = first.setdefault(parameter, (name, cut, key))
            if other == name or cut is there:
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


def _resolve(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, Style]:
    """The style of each module that the plan names. Raises ValueError for a name that matches
    nothing, and for two that match one module."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    found: dict[str, tuple[str, Style]] = {}
    for pattern, value in plan.items():
        style, matched = _style(pattern, value), [n for n in names if _matches(n, pattern)]
        if not matched:
            raise ValueError(f"the plan's {pattern!r} matches no module{_there_is(names, pattern)}")
        for name in matched:
            if name in found:
                both = f"{found[name][0]!r} and {pattern!r}"
                raise ValueError(f"{name}: the plan names it twice, by {both}")
            found[name] = pattern, style
    return {name: style for name, (_, style) in found.items()}


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch, parts, wanted))


def _there_is(names: list[str], pattern: str) -> str:
    """What there is, where the pattern stops to match."""
    parts = pattern.split(".")
    for length in range(len(parts) - 1, -1, -1):
        start = ".".join(parts[:length])
        for name in names:
            if _matches(name, start):
                children = [n for n in names if n and n.rpartition(".")[0] == name]
                place = name or "the model"
                last = [child.rpartition(".")[2] for child in children]
                return f": {place} has {', '.join(last) or 'no parts'}"
    return ""


def _style(pattern: str, value: Any) -> Style:
    """The style that a plan means. Raises ValueError or TypeError for one that there is not."""
    if isinstance(value, Style):
        return value
    if isinstance(value, str):
        if value not in STYLES:
            known = ", ".join(STYLES)
            raise ValueError(f"the plan's {pattern!r}: no style {value!r}; there are {known}")
        return STYLES[value]
    if isinstance(value, TorchSequenceParallel) and value.sequence_sharding == (Shard(1),):
        return STYLES["copied"]
    if isinstance(value, ColwiseParallel | RowwiseParallel) and (style := _of_torch(value)):
        return style
    raise TypeError(
        f"the plan's {pattern!r}: minidist has nothing for {value}. It knows {', '.join(STYLES)}, "
        "qkv(...), heads(...), and ColwiseParallel, RowwiseParallel and SequenceParallel of torch, "
        "with inputs and outputs replicated or sharded along the features or dimension 1"
    )


def _of_torch(value: ColwiseParallel | RowwiseParallel) -> Style | None:
    """Our style for one of torch's, if there is one for its layouts."""
    (into,), (out,) = value.input_layouts, value.output_layouts
    replicated, sequence, features = Replicate(), Shard(1), Shard(-1)
    name = type(value).__name__
    if isinstance(value, ColwiseParallel):
        if into in (replicated, sequence) and out in (features, replicated):
            options = dict(sequence_parallel=into == sequence, gather_output=out == replicated)
            return Layer(name, COLUMNS, options)
    elif into in (features, replicated) and out in (replicated, sequence):
        kinds = ROWS if into == features else EMBEDDING
        return Layer(name, kinds, dict(sequence_parallel=out == sequence))
    return None
