"""How a model of any make is split by features: a plan says it, name by name.

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
    made: dict[nn.Module, nn.Module] = {}  # what stands in a module's place, wherever that is
    for module, (name, style) in styles.items():
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
        for name, child in parent._modules.items():
            if child in made:
                setattr(parent, name, made[child])
    for module in model.modules():
        if any(isinstance(part, ParallelLayer) for part in module.modules()):
            if isinstance(module, nn.TransformerEncoderLayer):
                # Evaluated, it would read the weights of its parts, this rank's, and not call them.
                module.activation_relu_or_gelu = 0
            elif isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False  # which only that way of its layers takes


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


def _resolve(model: nn.Module, plan: Mapping[str, Any]) -> dict[nn.Module, tuple[str, Style]]:
    """A name and the style of each module that the plan names. Raises ValueError for a pattern that
    matches nothing, for two that match one name, and for two styles of one module."""
    found: dict[str, str] = {}
    styles: dict[nn.Module, tuple[str, Style]] = {}
    modules = list(model.named_modules(remove_duplicate=False))
    for pattern, value in plan.items():
        style, matched = style_of(pattern, value), [m for m in modules if _matches(m[0], pattern)]
        if not matched:
            raise ValueError(f"the plan's {pattern!r} matches no module{_there_is(model, pattern)}")
        for name, module in matched:
            if name in found:
                both = f"{found[name]!r} and {pattern!r}"
                raise ValueError(f"{name}: the plan names it twice, by {both}")
            found[name] = pattern
            other, known = styles.setdefault(module, (name, style))
            if known != style:
                raise ValueError(f"{other} and {name} are one module, with two styles in the plan")
    return styles


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch, parts, wanted))


def _there_is(model: nn.Module, pattern: str) -> str:
    """What there is, where the pattern stops to match."""
    parts = pattern.split(".")
    starts = [".".join(parts[:length]) for length in reversed(range(len(parts)))]
    for start in starts:  # the last is "", the model
        for name, module in model.named_modules():
            if _matches(name, start):
                children = ", ".join(child for child, _ in module.named_children())
                return f": {name or 'the model'} has {children or 'no parts'}"
    return ""
