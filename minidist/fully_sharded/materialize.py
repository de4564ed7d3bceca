"""Before a module becomes a unit: it gets values, and its precision. Lesson: fsdp_in_practice"""

from collections.abc import Callable, Set

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from minidist import rank
from minidist.fully_sharded.fully_shard import Modules, own_modules, places_of, tensors_of


def materialize(own: Modules, init: Callable[[nn.Module], object] | None) -> torch.device:
    """Give memory and values to what is on the device "meta". Returns the device of all."""
    tensors = tensors_of(own)
    device = next((tensor.device for tensor in tensors if not tensor.is_meta), rank.device())
    ties = places_of(own)
    for name, module in own:
        if not any(tensor.is_meta for tensor in tensors_of([("", module)])):
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


def of_classes(
    module: nn.Module, kept: tuple[type, ...], without: Set[nn.Module], parts: dict[str, nn.Module]
) -> dict[str, nn.Module]:
    """The modules that keep their precision, by name: units of their own, but for those chosen."""
    found = {each: name.rstrip(".") for name, each in own_modules(module, without)}
    return {
        name: each
        for each, name in found.items()
        if isinstance(each, kept) and each is not module and each not in parts.values()
    }


def own_precision(own: Modules, low: torch.dtype | None) -> MixedPrecisionPolicy:
    """Inputs are cast to the dtype that the module has, and outputs to the others' dtype."""
    floating = (t.dtype for t in tensors_of(own) if t.is_floating_point())
    return MixedPrecisionPolicy(next(floating, None), output_dtype=low)


def cast_buffers(own: Modules, dtype: torch.dtype | None) -> None:
    for _, module in own:
        for name, buffer in module._buffers.items():
            if dtype and buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)
