"""What `dist.ReduceOp` means, element by element (lesson: collectives)."""

from collections.abc import Callable

import torch

FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,  # "or" on bool
    "AVG": torch.add,  # a sum, divided by the number of ranks at the end
    "PRODUCT": torch.mul,  # "and" on bool
    "MIN": torch.minimum,  # NaN where either is NaN
    "MAX": torch.maximum,
}


class Reduction:
    """A `dist.ReduceOp`, by name: `reduction(a, b, out)` combines two ranks' tensors by element.

    Raises ValueError for one that is unknown, or that torch does not have for `dtype`.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        if name not in FUNCTIONS:
            raise ValueError(f"op must be one of {', '.join(FUNCTIONS)}, not {name}")
        self.name, self.function = name, FUNCTIONS[name]
        one = torch.ones(1, dtype=dtype)
        try:
            self.finish(self(one, one, out=one), 1)
        except RuntimeError as error:
            raise ValueError(f"{name} is not defined for {dtype}") from error

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return self.function(a, b, out=out)

    def finish(self, total: torch.Tensor, ranks: int) -> None:
        """Turn the combination of all `ranks` tensors into the result, in place."""
        if self.name == "AVG":
            total.div_(ranks)
