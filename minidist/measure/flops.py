"""Arithmetic, counted: matrix products and attention (lesson: activation_checkpointing)."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


def count_flops(function: Callable[..., Any], *args: Any) -> int:
    """The floating-point operations of `function(*args)`, backward passes and all: 2 mnk for the
    product of an m × k matrix and a k × n one. Lesson: activation_checkpointing.

    Counted are matrix products, convolutions and attention, which have nearly all the arithmetic of
    a model. (torch's counter, and beside it the attention that torch has for CPUs.)
    """
    aten = torch.ops.aten
    own = {
        aten._scaled_dot_product_flash_attention_for_cpu: _forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
    }
    with FlopCounterMode(display=False, custom_mapping=own) as counter:
        function(*args)
    return int(counter.get_total_flops())


def _forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))
