"""What `dist.ReduceOp` means, element by element (lesson: collectives)."""

from collections.abc import Callable

import torch
import torch.distributed as dist

_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_COMPLEX = {torch.complex64, torch.complex128}
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}

# name: (element-wise function of two tensors, dtypes that it is defined for)
_OPERATIONS: dict[str, tuple[Callable[..., torch.Tensor], set[torch.dtype]]] = {
    "SUM": (torch.add, _FLOATS | _COMPLEX | _INTEGERS),
    "AVG": (torch.add, _FLOATS | _COMPLEX),  # a sum, divided by the number of ranks at the end
    "PRODUCT": (torch.mul, _FLOATS | _COMPLEX | _INTEGERS),
    "MIN": (torch.minimum, _FLOATS | _INTEGERS),
    "MAX": (torch.maximum, _FLOATS | _INTEGERS),
    "BAND": (torch.bitwise_and, _INTEGERS),
    "BOR": (torch.bitwise_or, _INTEGERS),
    "BXOR": (torch.bitwise_xor, _INTEGERS),
}


class Reduction:
    """One `dist.ReduceOp`: `reduction(a, b, out)` combines two ranks' tensors, element by element.

    On bool, SUM is "or" and PRODUCT is "and". MIN and MAX of a NaN are NaN. AVG is for floating
    and complex numbers only; MIN, MAX and AVG keep the dtype. Raises ValueError for an operation
    that is unknown or not defined for `dtype`.
    """

    def __init__(self, op: dist.ReduceOp | dist.ReduceOp.RedOpType, dtype: torch.dtype) -> None:
        self.name = name(op)
        function, dtypes = _OPERATIONS.get(self.name, (None, set()))
        if function is None:
            raise ValueError(f"op must be one of {', '.join(_OPERATIONS)}, not {self.name}")
        if dtype not in dtypes:
            raise ValueError(f"{self.name} is not defined for {str(dtype).removeprefix('torch.')}")
        self.function = function

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return self.function(a, b, out=out)

    def finish(self, total: torch.Tensor, ranks: int) -> None:
        """Turn the combination of all `ranks` tensors into the result, in place."""
        if self.name == "AVG":
            total.div_(ranks)


def name(op: object) -> str:
    """The name of a `dist.ReduceOp`, such as "SUM"; of anything else, how Python shows it."""
    kind = getattr(op, "op", op)  # ReduceOp.SUM itself, or what an object of ReduceOp stands for
    return str(getattr(kind, "name", type(op).__name__))
