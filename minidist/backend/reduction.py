"""What `dist.ReduceOp` means, element by element."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from minidist.backend.checks import Tensors, describe

Op: Any = dist.ReduceOp.RedOpType

FUNCTIONS: dict[Any, Callable[..., object]] = {
    Op.SUM: torch.add,
    Op.AVG: torch.add,  # and divided in the end
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}
BITWISE = [Op.BAND, Op.BOR, Op.BXOR]
ORDERED = [Op.MIN, Op.MAX]


@dataclass(frozen=True)
class Reduction:
    """How two tensors become one: `add(a, b, out=total)`; and then `finish(total)`."""

    add: Callable[..., object]
    finish: Callable[[torch.Tensor], object] = lambda total: None

    def into(self, total: torch.Tensor, x: torch.Tensor, others: Iterable[torch.Tensor]) -> None:
        """total: x and all others, added up. It may be x itself."""
        for other in others:
            self.add(x, other, out=total)
            x = total
        if x is not total:
            total.copy_(x)
        self.finish(total)

    @classmethod
    def of(cls, what: str, op: Any, tensors: Tensors, size: int) -> tuple[str, "Reduction"]:
        """The name of a `dist.ReduceOp`, and what it does to these tensors of so many ranks. Raises
        ValueError if there is no such operation, or not for numbers of such a kind."""
        op = getattr(op, "op", op)  # an object of ReduceOp
        name, reduction = _named(op, size)
        if reduction is None:
            raise ValueError(f'{what}: backend "shm" has no {op}')
        for x in tensors:
            if not _is_for(op, x.dtype):
                raise ValueError(f"{what}: there is no {name} of {describe(x)}")
        return name, reduction


# Both are asked at each call, and torch's operations are slow to compare.


@lru_cache(1024)
def _named(op: Any, size: int) -> tuple[str, Reduction | None]:
    if op not in FUNCTIONS:
        return "", None
    if op == Op.AVG:
        return op.name, Reduction(FUNCTIONS[op], lambda total: total.div_(size))
    return op.name, Reduction(FUNCTIONS[op])


@lru_cache(1024)
def _is_for(op: Any, dtype: torch.dtype) -> bool:
    if op in BITWISE:
        return not (dtype.is_floating_point or dtype.is_complex)
    if op in ORDERED and dtype.is_complex:
        return False
    if op == Op.AVG and not (dtype.is_floating_point or dtype.is_complex):
        return False
    x = torch.zeros(1, dtype=dtype)
    try:  # of some dtypes torch has no sum
        FUNCTIONS[op](x, x, out=x)
    except NotImplementedError:
        return False
    return True
