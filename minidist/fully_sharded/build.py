"""From a module's parameters to a unit's flat ones (lesson 9)."""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from minidist import rank
from minidist.common.guard import Abandoned, abandon
from minidist.common.replicas import words
from minidist.common.wrapper import Wrapper
from minidist.fully_sharded.flat import FlatParameter, Kind, Place
from minidist.fully_sharded.options import Ignored, Precision
from minidist.fully_sharded.state_dicts import StateDicts
from minidist.fully_sharded.wrap import within

Modules = Sequence[tuple[str, nn.Module]]

SHARDED = (
    "FullyShardedDataParallel has put shards in its place. Make the optimizer after wrapping the "
    "module, of the wrapper's parameters()"
)


def own_modules(module: nn.Module, others: Set[nn.Module] = frozenset()) -> Modules:
    """The modules of a unit, by name: those that are in no unit within it, nor in `others`."""
    return list(within(module, lambda child: isinstance(child, StateDicts) or child in others))


def own_tensors(own: Modules, without: Set[nn.Parameter] = frozenset()) -> list[torch.Tensor]:
    """Their parameters and buffers, each once."""
    found = [
        tensor
        for _, module in own
        for tensor in [*module._parameters.values(), *module._buffers.values()]
        if tensor is not None and tensor not in without
    ]
    return list({id(tensor): tensor for tensor in found}.values())


def describe(module: nn.Module, parts: Set[nn.Module], ignored: Ignored) -> Iterator[str]:
    """What all ranks must have alike: of each unit that will be, its parameters and buffers.

    Raises ValueError if one parameter would be in two of them, or if another strategy is within.
    """
    home: dict[int, str] = {}
    for name, each in module.named_modules():
        if isinstance(each, StateDicts):
            yield f"unit {name}, wrapped by hand"
            for slot in (slot for flat in each.unit.flats for slot in flat.slots):
                yield words("parameter", slot.names[0], slot.piece.whole)
                home[id(slot.piece.own)] = name
        elif (
            isinstance(each, Wrapper)
            and "process_group" in vars(each)
            and each not in ignored.modules
        ):
            raise ValueError(
                f"{name or 'the module'} is a {type(each).__name__}, which sees to its gradients "
                "itself, and would find only shards: wrap the model without it"
            )
    roots = [("", module), *((n, m) for n, m in module.named_modules() if m in parts)]
    for unit, root in roots:
        yield f"unit {unit or '(the root)'}"
        tensors: dict[str, torch.Tensor | None] = {}
        for prefix, owner in own_modules(root, parts | ignored.modules):
            for name, parameter in owner._parameters.items():
                if parameter in ignored.parameters:
                    continue
                tensors[prefix + name] = parameter
                if parameter is not None and home.setdefault(id(parameter), unit) != unit:
                    raise ValueError(_tied(prefix + name, unit, home[id(parameter)]))
                if isinstance(parameter, Abandoned):
                    raise ValueError(_tied(prefix + name, unit, "one that is wrapped already"))
            tensors |= {prefix + name: buffer for name, buffer in owner._buffers.items()}
        for name, tensor in tensors.items():
            if tensor is not None:
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                yield words(kind, name, tensor)


def _tied(name: str, unit: str, other: str) -> str:
    return (
        f"parameter {name} of unit {unit or '(the root)'} is also in {other or 'the root'}: "
        "modules that share a parameter must be in the same unit"
    )


def materialize(own: Modules, param_init_fn: Callable[[nn.Module], object] | None) -> torch.device:
    """Give memory and values to what is on the device "meta". Returns the device of all."""
    tensors = own_tensors(own)
    device = next((t.device for t in tensors if not t.is_meta), rank.device())
    ties = _places(own)
    for name, module in own:
        direct = [*module._parameters.values(), *module._buffers.values()]
        if not any(tensor is not None and tensor.is_meta for tensor in direct):
            continue
        if param_init_fn is not None:
            param_init_fn(module)
        elif hasattr(module, "reset_parameters"):
            module.to_empty(device=device, recurse=False)
            module.reset_parameters()  # type: ignore[operator]
        else:
            raise ValueError(
                f"{name.rstrip('.') or 'the module'} is on the device meta, and has no "
                "reset_parameters(): pass param_init_fn"
            )
    for places, _ in ties.values():
        first, name = places[0][1]
        for _, (module, other) in places[1:]:
            module._parameters[other] = first._parameters[name]
    return device


def cast(own: Modules, precision: Precision) -> None:
    """Floating buffers, for good; and what goes into modules that keep their precision, and out."""
    for _, module in own:
        if isinstance(module, precision.kept):
            _keep_precision(module, precision)
            continue
        for name, buffer in module._buffers.items():
            if precision.buffer_dtype and buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(precision.buffer_dtype)


def _keep_precision(module: nn.Module, precision: Precision) -> None:
    own = next((t.dtype for t in own_tensors([("", module)]) if t.is_floating_point()), None)
    if own is None:
        return
    module.register_forward_pre_hook(lambda _, inputs: tree_map(partial(_to, own), inputs))
    back = partial(_to, precision.param_dtype)
    module.register_forward_hook(lambda _, __, output: tree_map(back, output))


def _to(dtype: torch.dtype | None, value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if floating else value


def flatten(
    own: Modules, kind: Kind, ignored: Ignored, kept: tuple[type[nn.Module], ...]
) -> list[FlatParameter]:
    """The flat parameters of a unit: one for each dtype, trained and frozen ones apart, and those
    of modules that are `kept` in full precision. Its modules get the pieces in place of their
    parameters."""
    alike: dict[Any, list[tuple[tuple[str, ...], tuple[Place, ...], nn.Parameter]]] = {}
    for places, parameter in _places(own, ignored.parameters).values():
        names, where = zip(*places, strict=True)
        full = any(isinstance(module, kept) for module, _ in where)
        alike.setdefault((parameter.dtype, parameter.requires_grad, full), []).append(
            (names, where, parameter)
        )
    flats = []
    for (_, _, full), named in alike.items():
        flat = FlatParameter(
            named, replace(kind, param_dtype=None, reduce_dtype=None) if full else kind
        )
        flats.append(flat)
        for slot, (_, _, parameter) in zip(flat.slots, named, strict=True):
            for module, name in slot.places:
                module._parameters[name] = slot.piece.own
            abandon(parameter, SHARDED)
    return flats


def _places(
    own: Modules, without: Set[nn.Parameter] = frozenset()
) -> dict[int, tuple[list[tuple[str, Place]], nn.Parameter]]:
    """Each parameter, with all its names and places."""
    found: dict[int, tuple[list[tuple[str, Place]], nn.Parameter]] = {}
    for prefix, module in own:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in without:
                places, _ = found.setdefault(id(parameter), ([], parameter))
                places.append((prefix + name, (module, name)))
    return found
