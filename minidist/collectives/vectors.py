"""Tensors of any shape as vectors, and back: the algorithms only know vectors."""

from typing import Any

import torch


def flat(given: Any) -> Any:
    """The elements of a tensor in a row, contiguous: (*,) -> (n,). A view where possible, else a
    copy. Of a list, a list of these; of None, an empty one."""
    if not isinstance(given, torch.Tensor):
        return [flat(each) for each in given or ()]
    return given.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def put_back(vector: Any, given: Any) -> None:
    """Write `vector`, which is `flat(given)`, back to what was given, if it was a copy."""
    if not isinstance(given, torch.Tensor):
        for pair in zip(vector, given or (), strict=True):
            put_back(*pair)
    elif vector.data_ptr() != given.data_ptr():
        given.detach().copy_(vector.view(given.shape))
