"""What torch's classes take and ours do not: refused by name, with the reason. No silent no-op."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn


class RefusedError(NotImplementedError, AttributeError):
    """A method of torch's that has no meaning here: `hasattr` says that there is none."""


def refuse(
    who: str, given: Mapping[str, Any], reasons: Mapping[str, str], taken: Collection[str] = ()
) -> None:
    """Raises ValueError for an argument that has a reason, if it is not None, False or 0; TypeError
    for one that has none and is not `taken`: torch does not have it either."""
    for name, value in given.items():
        if name not in reasons and name not in taken:
            raise TypeError(f"{who} has no argument {name}")
        off = value is None or (isinstance(value, int) and not value)  # `in` would compare tensors
        if name in reasons and not off:
            raise ValueError(f"{who} does not take {name}={value!r}: {reasons[name]}")


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks that a user has registered run with its forward or backward pass."""
    hooks = [hook for kind in _KINDS for hook in getattr(module, f"_{kind}_hooks").values()]
    return not all(str(getattr(hook, "__module__", "")).startswith("minidist.") for hook in hooks)


_KINDS = "forward", "forward_pre", "backward", "backward_pre"
