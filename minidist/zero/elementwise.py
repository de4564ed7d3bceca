"""Which optimizers can train shards (lesson: zero): those that look at one element at a time."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def require_elementwise(
    optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any], device: torch.device
) -> None:
    """Raises TypeError if this optimizer looks at more than one element at a time.

    It is tried out on a parameter of six elements: as one process trains it, and as two ranks do
    that have two and four of its elements. The updates must be the same. They are the same with
    SGD, Adam, AdamW, RMSprop, Adagrad. They differ with Adafactor and Muon, which look at rows and
    columns; with LARS and LAMB, which take norms of a parameter and its gradient; and with LBFGS,
    which looks at all parameters at once and computes the loss again.
    """
    # Values and gradients have nothing to do with each other, or a ratio of their norms would be
    # the same in every part.
    random = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(4, 6, generator=random).to(device).unbind()
    parts = slice(0, 2), slice(2, 6)
    cause = None
    try:
        alone = _update(
            optimizer_class, options, start.view(2, 3), [g.view(2, 3) for g in gradients]
        )
        shared = torch.cat(
            [
                _update(optimizer_class, options, start[part], [g[part] for g in gradients])
                for part in parts
            ]
        )
        # 1e-6: values around 1 are rounded, and so are the updates that are added to them.
        if (alone - shared).abs().max() <= 1e-3 * alone.abs().max() + 1e-6:
            return
    except Exception as error:
        cause = error
    raise TypeError(
        f"{optimizer_class.__name__} cannot train shards of parameters: it looks at more than one "
        "element at a time. Give ZeroRedundancyOptimizer an elementwise one, such as Adam"
    ) from cause


def _update(
    optimizer_class: Any,
    options: dict[str, Any],
    start: torch.Tensor,
    gradients: Sequence[torch.Tensor],
) -> torch.Tensor:
    """What a step with each gradient adds to a parameter, flat."""
    parameter = nn.Parameter(start.clone())
    optimizer = optimizer_class([{"params": [parameter], **copy.deepcopy(options)}])
    for group in optimizer.param_groups:
        if group.get("lr") is not None:  # a small one would hide the updates in rounding
            group["lr"] = group["lr"] * 0 + 1
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return (parameter.detach() - start).flatten()
