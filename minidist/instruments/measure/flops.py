"""Arithmetic, counted: matrix products and attention (lesson: activation_checkpointing)."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry, shape_wrapper


def count_flops(function: Callable[..., Any], *args: Any) -> int:
    """The floating-point operations of `function(*args)`, backward passes and all: 2 mnk for the
    product of an m × k matrix and a k × n one. Lesson: activation_checkpointing.

    Counted are matrix products, convolutions and attention, which have nearly all the arithmetic of
    a model. (It is torch's counter, with our own formulas for attention: those of torch 2.13 know
    neither the attention for CPUs nor heads that share keys and values.)
    """
    with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter:
        function(*args)
    return int(counter.get_total_flops())


def _forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Shapes (B, H, T, D): the scores, and their products with the values."""
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Five products: the scores again, their gradients, and those of the three inputs."""
    return 2 * prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


_ATTENTION: dict[Any, Callable[..., int]] = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}{which}"): formula
    for kind in (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
    )
    for which, formula in (("", _forward), ("_backward", _backward))
}
# By operation: of its arguments, and its result as `out_val`.
FORMULAS: dict[Any, Callable[..., int]] = flop_registry | {
    operation: shape_wrapper(formula) for operation, formula in _ATTENTION.items()
}
