"""Arithmetic, counted: matrix products and attention (lesson: activation_checkpointing)."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry, shape_wrapper


def count_flops(function: Callable[..., Any], *args: Any) -> int:
    """The floating-point operations of `function(*args)`, backward passes and all: 2 mnk for the
    product of an m × k matrix and a k × n one. Lesson: activation_checkpointing.

    Counted are matrix products, convolutions and attention, which have nearly all the arithmetic of
    a model. (It is torch's counter, which also takes attention on a CPU here.)
    """
    with FlopCounterMode(display=False, custom_mapping=_ON_CPU) as counter:
        function(*args)
    return int(counter.get_total_flops())


_ATTENTION = "_scaled_dot_product_flash_attention"
# Torch's counter does not know the attention for CPUs: it has the products of that for GPUs.
_ON_CPU: dict[Any, Callable[..., int]] = {
    getattr(torch.ops.aten, f"{_ATTENTION}_for_cpu{which}"): flop_registry[
        getattr(torch.ops.aten, f"{_ATTENTION}{which}")
    ].__wrapped__
    for which in ("", "_backward")
}
# By operation: of its arguments, and its result as `out_val`.
FORMULAS = flop_registry | {op: shape_wrapper(formula) for op, formula in _ON_CPU.items()}
