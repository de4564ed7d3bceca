"""A model on the device "meta" has shapes and no memory. Here some of its modules get values."""

from collections.abc import Callable, Sequence, Set

import torch
from torch import nn

from minidist.common.groups import is_rehearsal

Modules = Sequence[tuple[str, nn.Module]]  # by name, the outer ones first
Place = tuple[nn.Module, str]  # a module, and what it calls the parameter
Named = tuple[tuple[str, ...], tuple[Place, ...], nn.Parameter]


def state_of(own: Modules, without: Set[nn.Parameter] = frozenset()) -> list[torch.Tensor]:
    """The parameters and buffers of these modules, each once."""
    found = (t for _, m in own for t in (*m._parameters.values(), *m._buffers.values()))
    return list({id(t): t for t in found if t is not None and t not in without}.values())


def places_of(own: Modules, without: Set[nn.Parameter] = frozenset()) -> list[Named]:
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


def materialize(
    own: Modules, device: torch.device, init: Callable[[nn.Module], object] | None
) -> None:
    """Give memory and values to what is on the device "meta", module by module: by `init`, or by
    `to_empty` and `reset_parameters`, as torch does it. A tied parameter gets the values that the
    first module with it has. A module of which a part is there is drawn anew as a whole.

    Raises ValueError for a module that is still on "meta" after that.
    """
    if is_rehearsal():  # it stays there
        return
    ties = places_of(own)
    for name, module in own:
        alone = [("", module)]
        if not any(tensor.is_meta for tensor in state_of(alone)):
            continue
        if init is not None:
            init(module)
        elif hasattr(module, "reset_parameters"):
            module.to_empty(device=device, recurse=False)
            module.reset_parameters()  # type: ignore[operator]
        if any(tensor.is_meta for tensor in state_of(alone)):
            why = "it has no reset_parameters()"
            why = why if init is None else "param_init_fn leaves it there"
            raise ValueError(f"{name.rstrip('.') or 'the module'} is on the device meta, and {why}")
    tie_again(ties)


def tie_again(ties: Sequence[Named]) -> dict[nn.Parameter, nn.Parameter]:
    """What was one parameter in several places is one again, that of the first place. Returns what
    each has become."""
    become = {}
    for _, places, parameter in ties:
        first, name = places[0]
        become[parameter] = first._parameters[name]
        for module, other in places[1:]:
            module._parameters[other] = become[parameter]
    return become  # type: ignore[return-value]  # none of them is None
