"""Before a module becomes a unit: where it is, and its precision. Lesson: fsdp_in_practice"""

from collections.abc import Set

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from minidist import rank
from minidist.common.materialize import Modules, state_of
from minidist.fully_sharded.fully_shard import own_modules


def device_of(own: Modules) -> torch.device:
    """Of a unit, where it is or will be."""
    there = (tensor.device for tensor in state_of(own) if not tensor.is_meta)
    return next(there, rank.device())


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
    floating = (t.dtype for t in state_of(own) if t.is_floating_point())
    return MixedPrecisionPolicy(next(floating, None), output_dtype=low)


def cast_buffers(own: Modules, dtype: torch.dtype | None) -> None:
    for _, module in own:
        for name, buffer in module._buffers.items():
            if dtype and buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)
