"""From a module to a unit: what a rank has of it afterwards is its shard. Lesson: fully_sharded"""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from minidist import rank
from minidist.common import agree
from minidist.common.guard import Abandoned, abandon
from minidist.common.replicas import broadcast_state, require_same_lines, words
from minidist.common.wrapper import Wrapper
from minidist.fully_sharded import sharded_states
from minidist.fully_sharded.flat_parameter import FlatParameter, Named, Place, Sharding
from minidist.fully_sharded.torch_arguments import Options, require_device
from minidist.fully_sharded.unit_policies import within
from minidist.fully_sharded.unit_schedule import Schedule, cast
from minidist.fully_sharded.units import Form, Unit, unit_of, units_in

Modules = Sequence[tuple[str, nn.Module]]

SHARDED = (
    "shards of it have taken its place. Make the optimizer after wrapping, or sharding, of the "
    "module's parameters()"
)


def build(module: nn.Module, options: Options, form: Form, device_id: Any = None) -> Unit:
    """Shard the parameters of a module, but for those of units within it. Every rank takes what
    rank 0 has. The module's `state_dict` has what `form` makes of them."""
    own = own_modules(module, options.ignored_modules)
    device = _materialize(own, options.param_init_fn)
    require_device(device_id, device)
    for group in options.groups[::-1]:
        broadcast_state(_tensors(own, options.ignored_parameters), group)
    _keep_precisions(own, options)
    flats = _flatten(own, options, device)
    modules = [each for _, each in own]
    inner = units_in(module)
    unit = Unit(module, modules, flats, options, device, form, options.reshards, Any)  # type: ignore[arg-type]
    schedule = Schedule([unit, *inner], options.prefetches)
    for each in schedule.units:
        each.schedule = schedule
    sharded_states.attach(unit)
    return unit


def own_modules(module: nn.Module, without: Set[nn.Module] = frozenset()) -> Modules:
    """The modules of a unit, by name: those that are in no unit within it, nor in `without`."""
    return list(within(module, lambda m: unit_of(m) is not None or m in without))


def require_alike(
    module: nn.Module, options: Options, choose: Callable[[], dict[str, nn.Module]]
) -> dict[str, nn.Module]:
    """What `choose` gives: the modules that will be units. Raises on every rank if it fails on one,
    or if the ranks do not have the same units of the same tensors."""
    parts, lines, problem = dict[str, nn.Module](), list[str](), None
    try:
        parts = choose()
        lines = list(_describe(module, set(parts.values()), options))
    except Exception as error:
        problem = error
    agree.raise_along(options.groups, problem)
    for group in options.groups:
        try:
            require_same_lines(lines, group)
        except ValueError as error:
            problem = error
    agree.pass_on_along(options.groups, problem)
    return parts


def _describe(module: nn.Module, parts: Set[nn.Module], options: Options) -> Iterator[str]:
    """Of each unit that will be, its parameters and buffers. Raises ValueError if one parameter
    would be in two of them, or if another strategy is within."""
    home: dict[int, str] = {}
    for name, each in module.named_modules():
        if unit := unit_of(each):
            yield f"unit {name}, wrapped by hand"
            for sharded in (p for flat in unit.flats for p in flat.parameters):
                yield words("parameter", sharded.names[0], sharded.full)
                home[id(sharded.local)] = name
        elif (
            isinstance(each, Wrapper)
            and "process_group" in vars(each)
            and each not in options.ignored_modules
        ):
            raise ValueError(
                f"{name or 'the module'} is a {type(each).__name__}, which sees to its gradients "
                "itself, and would find only shards: wrap the model without it"
            )
    roots = [("", module), *((n, m) for n, m in module.named_modules() if m in parts)]
    for unit_name, root in roots:
        yield f"unit {unit_name or '(the root)'}"
        for prefix, owner in own_modules(root, parts | options.ignored_modules):
            for name, parameter in owner._parameters.items():
                if parameter is None or parameter in options.ignored_parameters:
                    continue
                other = home.setdefault(id(parameter), unit_name)
                if other != unit_name or isinstance(parameter, Abandoned):
                    raise ValueError(
                        f"parameter {prefix + name} of unit {unit_name or '(the root)'} is also in "
                        f"{other or 'the root'}, or was: modules that share a parameter must be in "
                        "the same unit"
                    )
                yield words("parameter", prefix + name, parameter)
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    yield words("buffer", prefix + name, buffer)


def _tensors(own: Modules, without: Set[nn.Parameter] = frozenset()) -> list[torch.Tensor]:
    """The parameters and buffers of these modules, each once."""
    found = [
        tensor
        for _, module in own
        for tensor in [*module._parameters.values(), *module._buffers.values()]
        if tensor is not None and tensor not in without
    ]
    return list({id(tensor): tensor for tensor in found}.values())


def _materialize(own: Modules, init: Callable[[nn.Module], object] | None) -> torch.device:
    """Give memory and values to what is on the device "meta". Returns the device of all."""
    device = next((t.device for t in _tensors(own) if not t.is_meta), rank.device())
    ties = _places(own)
    for name, module in own:
        if not any(tensor.is_meta for tensor in _tensors([("", module)])):
            continue
        if init is not None:
            init(module)
        elif hasattr(module, "reset_parameters"):
            module.to_empty(device=device, recurse=False)
            module.reset_parameters()  # type: ignore[operator]
        else:
            raise ValueError(
                f"{name.rstrip('.') or 'the module'} is on the device meta, and has no "
                "reset_parameters(): pass param_init_fn"
            )
    for _, places, _ in ties:
        first, name = places[0]
        for module, other in places[1:]:
            module._parameters[other] = first._parameters[name]
    return device


def _keep_precisions(own: Modules, options: Options) -> None:
    """Buffers get the `buffer_dtype`, for good. Batch norms and the like keep the dtype that they
    have: their inputs are cast to it, and their outputs to the `param_dtype`."""
    dtype = options.precision.buffer_dtype
    for _, module in own:
        if isinstance(module, options.kept):
            floating = (t.dtype for t in _tensors([("", module)]) if t.is_floating_point())
            if kept := next(floating, None):
                module.register_forward_pre_hook(partial(_cast_inputs, kept))
                module.register_forward_hook(partial(_cast_output, options.precision.param_dtype))
            continue
        for name, buffer in module._buffers.items():
            if dtype and buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def _cast_inputs(dtype: torch.dtype, _: nn.Module, inputs: Any) -> Any:
    return cast(inputs, dtype)


def _cast_output(dtype: torch.dtype | None, _: nn.Module, __: Any, output: Any) -> Any:
    return cast(output, dtype)


def _flatten(own: Modules, options: Options, device: torch.device) -> list[FlatParameter]:
    """One flat parameter for each dtype, trained and frozen ones apart, and those of modules that
    keep their precision. The modules get the local shards in place of their parameters."""
    alike: dict[Any, list[Named]] = {}
    for named in _places(own, options.ignored_parameters):
        _, places, parameter = named
        kept = any(isinstance(module, options.kept) for module, _ in places)
        alike.setdefault((parameter.dtype, parameter.requires_grad, kept), []).append(named)
    precision, flats = options.precision, list[FlatParameter]()
    home = torch.device("cpu") if options.offloads else device
    low = Sharding(options.groups, device, home, precision.param_dtype, precision.reduce_dtype)
    for (_, _, kept), group in alike.items():
        full = replace(low, param_dtype=None, reduce_dtype=None)
        flats.append(FlatParameter(group, full if kept else low))
        flats[-1].put([each.local for each in flats[-1].parameters])
        for _, _, parameter in group:
            abandon(parameter, SHARDED)
    return flats


def _places(own: Modules, without: Set[nn.Parameter] = frozenset()) -> list[Named]:
    """Each parameter, with all its names and places."""
    found: dict[nn.Parameter, list[tuple[str, Place]]] = {}
    for prefix, module in own:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in without:
                found.setdefault(parameter, []).append((prefix + name, (module, name)))
    return [
        (tuple(name for name, _ in places), tuple(place for _, place in places), parameter)
        for parameter, places in found.items()
    ]
