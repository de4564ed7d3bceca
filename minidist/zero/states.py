"""Checkpoints that do not tell how many ranks there were (lesson 8): optimizer states joined, to
those that one process has, and cut again for other ranks.

A state is elementwise, of the shape of its parameter, or a number for the whole of it, such as the
count of steps.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from minidist.distributed_data_parallel.buckets import dense_strides
from minidist.zero.partition import Piece, in_memory_order

States = dict[int, dict[str, Any]]  # by the number of the parameter: its states, by name


def join(
    parameters: Sequence[torch.Tensor], ranks: Iterable[dict[int, tuple[slice, dict[str, Any]]]]
) -> States:
    """The states of whole parameters, on the CPU. `ranks`: of each rank, by the number of the
    parameter, the span that it owns and the states of that."""
    whole: States = {}
    for owned in ranks:
        for number, (span, states) in owned.items():
            parameter = parameters[number]
            for name, value in states.items():
                if not (isinstance(value, torch.Tensor) and value.ndim):
                    whole.setdefault(number, {})[name] = value
                    continue
                into = whole.setdefault(number, {}).setdefault(name, _empty(parameter, value))
                into.as_strided((into.numel(),), (1,))[span] = value
    return dict(sorted(whole.items()))


def cut(piece: Piece, number: int, states: dict[str, Any]) -> dict[str, Any]:
    """The states of a piece. Raises ValueError if they are not those of its parameter."""
    return {name: _cut(piece, number, name, value) for name, value in states.items()}


def _cut(piece: Piece, number: int, name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or name == "step":
        return value
    if value.shape == piece.whole.shape:
        return in_memory_order(value, piece.whole)[piece.span].clone()
    if value.ndim == 0:
        return value
    raise ValueError(
        f"this state_dict is of another model: {name} of parameter {number} has shape "
        f"{tuple(value.shape)}, and the parameter {tuple(piece.whole.shape)}"
    )


def _empty(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    strides = dense_strides(parameter)
    return torch.empty_strided(parameter.shape, strides, dtype=value.dtype)
