"""Of a model, the layers of one rank: what can be cut into them, and what is left of it there."""

from typing import Any

import torch
from torch import nn

from minidist.common.wrapper import Wrapper


def require_layers(module: Any) -> None:
    if isinstance(module, Wrapper) or not (
        isinstance(module, nn.Sequential) or hasattr(module, "sequential")
    ):
        raise TypeError(
            "MixedParallel takes an nn.Sequential, or a model whose sequential() gives its layers, "
            f"not {type(module).__name__}"
        )


def require_in_layers(module: nn.Module, layers: nn.Sequential) -> None:
    """A strategy around a stage replaces the parameters of its layers, and those alone."""
    modules, parameters = set(layers.modules()), set(layers.parameters())
    for place, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if owner not in modules and parameter in parameters:
                raise ValueError(
                    f"{place}.{name}".lstrip(".") + " is in a layer that sequential() makes, and "
                    "in no layer of the model: it cannot be sharded. Make it a parameter of a "
                    "layer that the model has"
                )


def keep_only(module: nn.Module, kept: set[nn.Module], elsewhere: set[torch.Tensor]) -> None:
    """Take out of a module all modules that are not in `kept` and have none of these within them;
    and of all that stay the parameters and buffers that are `elsewhere`: on other ranks only."""
    for table in (module._parameters, module._buffers):
        for name in [name for name, tensor in table.items() if tensor in elsewhere]:
            del table[name]
    for name, child in list(module._modules.items()):
        if child is None or child in kept:
            continue
        if kept.isdisjoint(child.modules()):
            del module._modules[name]
        else:
            keep_only(child, kept, elsewhere)
