"""What `dist.ReduceOp` means, element by element."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Reduction:
    """How two tensors become one: `add(a, b, out=total)`; and then `finish(total)`."""

    name: str  # that of the `dist.ReduceOp`
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
    def of(cls, what: str, op: Any, tensors: Tensors, size: int) -> "Reduction":
        """What a `dist.ReduceOp` does to these tensors of so many ranks. Raises ValueError if torch
        cannot do that to numbers of such a kind."""
        op, found = getattr(op, "op", op), None  # it may be an object of ReduceOp
        for x in tensors:
            found = _reduction(op, x.dtype, size)
            if found is None:
                raise ValueError(f"{what}: there is no {op.name} of {describe(x)}")
        if found is None:
            raise ValueError(f"{what} takes one tensor or more")
        return found


@lru_cache(1024)  # it is asked at each call, and takes a while
def _reduction(op: Any, dtype: torch.dtype, size: int) -> Reduction | None:
    if op not in FUNCTIONS:
        return None
    reduction = Reduction(op.name, FUNCTIONS[op])
    if op == Op.AVG:
        reduction = replace(reduction, finish=lambda total: total.div_(size))
    try:  # Torch does not add all that it can store. Ask before a message is under way.
        x = torch.ones(1, dtype=dtype, device="cpu")
        reduction.into(x, x, [x])
    except RuntimeError:
        return None
    return reduction
