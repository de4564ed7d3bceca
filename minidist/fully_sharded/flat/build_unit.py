"""From a module to a unit: what a rank has of it afterwards is its shard. Lesson: fully_sharded"""

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import nn

from minidist import rank
from minidist.common import agree
from minidist.common.guard import Abandoned, abandon
from minidist.common.replicas import broadcast_state, require_same_lines, words
from minidist.common.wrapper import Wrapper
from minidist.distributed_data_parallel import DistributedDataParallel
from minidist.fully_sharded.flat import sharded_states
from minidist.fully_sharded.flat.flat_parameter import FlatParameter, Named, Place
from minidist.fully_sharded.flat.torch_arguments import Options, require_device
from minidist.fully_sharded.flat.unit_schedule import Schedule, cast
from minidist.fully_sharded.flat.units import Form, FSDPModule, Unit, unit_of, units_in
from minidist.mixed import MixedParallel
from minidist.pipeline import Pipeline
from minidist.zero import ShardedDataParallel

Modules = Sequence[tuple[str, nn.Module]]

STRATEGIES = DistributedDataParallel, ShardedDataParallel, Pipeline, MixedParallel

SHARDED = (
    "shards of it have taken its place. Make the optimizer after wrapping, or sharding, of the "
    "module's parameters()"
)


def shard(module: nn.Module, options: Options, form: Form, device_id: Any = None) -> Unit:
    """Make a unit of a module, in place: shard its parameters, but for those of units within it.
    Every rank takes what rank 0 has. `state_dict` has what `form` makes of the parameters."""
    own = list(own_modules(module, options.ignored_modules))
    device = _materialize(own, options.param_init_fn)
    require_device(device_id, device)
    for group in options.groups[::-1]:
        broadcast_state(_tensors(own, options.ignored_parameters), group)
    _keep_precisions(own, options)
    flats = _flatten(own, options, device)
    modules = [each for _, each in own]
    unit = Unit(module, modules, flats, options, device, form, options.reshards)
    module.__dict__["fsdp_unit"] = unit
    kind = type(module)
    module.__class__ = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})
    schedule = Schedule(units_in(module), options.prefetches)
    for each in schedule.units:
        each.schedule = schedule
    sharded_states.attach(unit)
    return unit


def own_modules(
    module: nn.Module, without: Set[nn.Module] = frozenset(), prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a unit, by name, the outer ones first: those that are in no unit within it,
    nor in `without`. One that is there twice comes twice. A wrapper adds nothing to the names."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and unit_of(child) is None and child not in without:
            inner = prefix if isinstance(module, Wrapper) else f"{prefix}{name}."
            yield from own_modules(child, without, inner)


def require_alike(
    module: nn.Module, options: Options, choose: Callable[[], dict[str, nn.Module]]
) -> dict[str, nn.Module]:
    """What `choose` gives: the modules that will be units. Raises on every rank if it fails on one,
    or if the ranks do not have the same units of the same tensors."""
    with agree.together(*options.groups):
        parts = choose()
        lines = list(_describe(module, set(parts.values()), options))
    problem: Exception | None = None
    for group in options.groups:
        try:
            require_same_lines(lines, group)
        except ValueError as error:
            problem = error
    agree.pass_on_along(options.groups, problem)
    return parts


def _describe(module: nn.Module, parts: Set[nn.Module], options: Options) -> Iterator[str]:
    """The units, and their parameters and buffers. Raises ValueError if one parameter would be in
    two units, or if another strategy is within."""
    home: dict[torch.Tensor, str] = {}
    roots = {"(the root)": module}
    for name, each in module.named_modules():
        if unit := unit_of(each):
            yield f"unit {name}, wrapped by hand"
            home |= {each.local: name for flat in unit.flats for each in flat.parameters}
        elif each in parts:
            roots[name] = each
        elif isinstance(each, STRATEGIES):
            if each not in options.ignored_modules:
                raise ValueError(
                    f"{name or 'the module'} is a {type(each).__name__}, which sees to its "
                    "gradients itself, and would find only shards: wrap the model without it"
                )
    for unit_name, root in roots.items():
        yield f"unit {unit_name}"
        for prefix, owner in own_modules(root, parts | options.ignored_modules):
            for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
                if tensor is None or tensor in options.ignored_parameters:
                    continue
                trained = isinstance(tensor, nn.Parameter)
                other = home.setdefault(tensor, unit_name) if trained else unit_name
                if other != unit_name or isinstance(tensor, Abandoned):
                    raise ValueError(
                        f"parameter {prefix + name} of unit {unit_name} is also in {other}, or "
                        "was: modules that share a parameter must be in the same unit"
                    )
                yield words("parameter" if trained else "buffer", prefix + name, tensor)


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
    low, dtype = options.precision.param_dtype, options.precision.buffer_dtype
    for _, module in own:
        if isinstance(module, options.kept):
            floating = (t.dtype for t in _tensors([("", module)]) if t.is_floating_point())
            if kept := next(floating, None):
                module.register_forward_pre_hook(lambda _, x, kept=kept: cast(x, kept))
                module.register_forward_hook(lambda _, __, output: cast(output, low))
            continue
        for name, buffer in module._buffers.items():
            if dtype and buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def _flatten(own: Modules, options: Options, device: torch.device) -> list[FlatParameter]:
    """One flat parameter for each dtype, trained and frozen ones apart, and those of modules that
    keep their precision. The modules get the local shards in place of their parameters."""
    alike: dict[Any, list[Named]] = {}
    for named in _places(own, options.ignored_parameters):
        _, places, parameter = named
        kept = any(isinstance(module, options.kept) for module, _ in places)
        alike.setdefault((parameter.dtype, parameter.requires_grad, kept), []).append(named)
    flats = []
    for (_, _, kept), group in alike.items():
        flats.append(FlatParameter(group, options, device, precise=kept))
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
