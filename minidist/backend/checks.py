"""What a rank can see to be wrong before it communicates.

Then its call raises a ValueError, and the group is as it was.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

Tensors = Sequence[torch.Tensor]
Op: Any = dist.ReduceOp.RedOpType

BITWISE = [Op.BAND, Op.BOR, Op.BXOR]
ORDERED = [Op.MIN, Op.MAX]


def tell(*tensors: torch.Tensor) -> str:
    """Their dtypes and shapes, in words."""
    return ", ".join(f"{str(x.dtype).removeprefix('torch.')}{tuple(x.shape)}" for x in tensors)


def dense(what: str, tensors: Tensors) -> None:
    """They lie in the memory of the CPU, one element after another."""
    for x in tensors:
        if x.layout != torch.strided or x.device.type != "cpu":
            raise ValueError(
                f'{what}: backend "shm" takes dense tensors on the CPU, not {tell(x)} '
                f"({x.layout}, on {x.device})"
            )


def one_each(what: str, parts: Tensors, x: torch.Tensor, size: int) -> None:
    """There is a part for each rank, like x."""
    if len(parts) != size:
        raise ValueError(f"{what} takes {size} tensors, one for each rank, not {len(parts)}")
    for rank, part in enumerate(parts):
        if part.numel() != x.numel() or part.dtype != x.dtype:
            raise ValueError(f"{what}: {tell(part)} for rank {rank}, beside {tell(x)}")


def together(what: str, whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    """The whole has room for such a part of each rank."""
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise ValueError(f"{what}: {tell(whole)} is not {size} times {tell(part)}")


def splits(what: str, x: torch.Tensor, rows: Sequence[int], size: int) -> list[int]:
    """The number of elements for each rank, of a tensor that is cut into so many rows for each; or
    into equal parts."""
    there = len(x) if x.dim() else 1
    rows = rows or ([there // size] * size)
    if len(rows) != size or sum(rows) != there or min(rows) < 0:
        raise ValueError(f"{what}: {tell(x)} cannot be cut into {list(rows)} rows for {size} ranks")
    return [x.numel() // there * n if there else 0 for n in rows]


def reducible(what: str, op: Any, tensors: Tensors) -> None:
    """The operation is one of numbers of such a kind."""
    for x in tensors:
        kind = x.dtype
        if (
            (op in BITWISE and (kind.is_floating_point or kind.is_complex))
            or (op in ORDERED and kind.is_complex)
            or (op == Op.AVG and not (kind.is_floating_point or kind.is_complex))
        ):
            raise ValueError(f"{what}: there is no {op.name} of {tell(x)}")
