"""What `dist.ReduceOp` means, element by element (lesson: collectives)."""

from collections.abc import Callable
from functools import cache

import torch

_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,  # a sum, divided by the number of ranks at the end
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


class Reduction:
    """A `dist.ReduceOp`, by name: `reduction(a, b, out)` combines two ranks' tensors by element.

    On bool, SUM is "or" and PRODUCT is "and". MIN and MAX of a NaN are NaN. AVG is for floating
    and complex numbers only; MIN, MAX and AVG keep the dtype. Raises ValueError for an operation
    that is unknown or not defined for `dtype`.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        if name not in _FUNCTIONS:
            raise ValueError(f"op must be one of {', '.join(_FUNCTIONS)}, not {name}")
        self.name, self.function = name, _FUNCTIONS[name]
        try:  # torch knows for which dtypes
            one = torch.ones(1, dtype=dtype, device="cpu")
            self.finish(self(one, one, out=one), 1)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            wrong = f"{name} is not defined for {str(dtype).removeprefix('torch.')}"
            raise ValueError(wrong) from error

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return self.function(a, b, out=out)

    def finish(self, total: torch.Tensor, ranks: int) -> None:
        """Turn the combination of all `ranks` tensors into the result, in place."""
        if self.name == "AVG":
            total.div_(ranks)


reduction = cache(Reduction)  # so that an operation is tried out once for a dtype


def name(op: object) -> str:
    """The name of a `dist.ReduceOp`, such as "SUM"; of anything else, how Python shows it."""
    kind = getattr(op, "op", op)  # ReduceOp.SUM itself, or what an object of ReduceOp stands for
    return str(getattr(kind, "name", type(op).__name__))
