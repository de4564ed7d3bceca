"""The tensors in what a module takes or gives: where a strategy meets autograd."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts, in torch's order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a DTensor; any other tensor as it is. No rank waits for another."""
    # Not by the class: to import that takes a third of the time that torch itself takes.
    own: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return own
