"""Which optimizers can train shards (lesson 8): those that look at one element at a time."""

import copy
from typing import Any

import torch
from torch import nn


def require_elementwise(
    optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any], device: torch.device
) -> None:
    """Tried out, on a parameter of six elements: whole, and in two pieces. The same must come out.

    It does with SGD, Adam, AdamW, RMSprop, Adagrad, ... Not so Adafactor and Muon, for which rows
    and columns matter, LARS and LAMB, with their norms of a parameter, and LBFGS, which looks at
    all parameters at once and asks for the loss again. Raises TypeError for those.
    """
    whole = torch.linspace(-1, 1, 6, device=device).view(2, 3)
    pieces = whole.flatten().split([2, 4])
    alone, shared = (_optimizer(optimizer_class, p, options) for p in ([whole], pieces))
    cause = None
    try:
        if torch.allclose(_train(*alone), _train(*shared), rtol=1e-4, atol=1e-7):
            return
    except Exception as error:
        cause = error
    raise TypeError(
        f"{optimizer_class.__name__} cannot train shards of parameters: it looks at more than one "
        "element at a time. Give ZeroRedundancyOptimizer an elementwise one, such as Adam"
    ) from cause


def _optimizer(
    optimizer_class: Any, parts: Any, options: dict[str, Any]
) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    parameters = [nn.Parameter(part.clone()) for part in parts]
    return parameters, optimizer_class([{"params": parameters, **copy.deepcopy(options)}])


def _train(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Three steps towards zero, each a little other. Returns all elements, (6,)."""
    for step in range(1, 4):
        for parameter in parameters:
            parameter.grad = parameter.detach() * step
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])
