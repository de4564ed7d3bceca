"""How a model of any make is split by features: a plan says it, name by name.

    {"layers.*.attention": heads("n_heads", "n_kv_heads"),
     "layers.*.attention.q": ColwiseParallel(), ..., "layers.*.attention.out": RowwiseParallel()}

The styles are torch's, with short names for them ("columns", "rows", …), which know what
`sequence_parallel` asks for; and a few that torch has no name for, such as `heads`.

A style puts a layer of this lesson in the place of one of torch's. What runs between a layer that
is split by columns and the next that is split by rows stays as it is, and sees this rank's features
only: so attention must count this rank's heads, and a weight that is replicated there ("copied")
gets a gradient that is summed over the ranks.
"""

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from torch import nn

from minidist.tensor_parallel.layer import ParallelLayer
from minidist.tensor_parallel.styles import Style, Where, style_of


def split_by(model: nn.Module, plan: Mapping[str, Any], where: Where) -> None:
    """Split a model in place, by a plan. See `parallelize_module`."""
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
    if made.get("", model) is not model:
        raise TypeError("the plan's '': the model itself cannot be replaced. Name its parts")
    _tie(model, made)
    for name in sorted(styles, key=lambda name: -name.count(".")):  # parts before the whole
        module = model.get_submodule(name)
        if module in by_module:
            styles[name].change(module, where)
        if made[name] is not module:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, made[name])
    for module in model.modules():
        if any(isinstance(part, ParallelLayer) for part in module.modules()):
            if isinstance(module, nn.TransformerEncoderLayer):
                # Evaluated, it would read the weights of its parts, this rank's, and not call them.
                module.activation_relu_or_gelu = 0
            elif isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False  # which only that way of its layers takes


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
        style, matched = style_of(pattern, value), [n for n in names if _matches(n, pattern)]
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
