"""Tensors of any shape as vectors, and back: the algorithms only know vectors."""

from collections.abc import Sequence

import torch


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in a row, contiguous: (*,) -> (n,). A view where possible, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def put_back(vector: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write `vector`, which is `flat(tensor)`, back to `tensor` if it was a copy."""
    if vector.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(vector.view(tensor.shape))


def put_back_all(vectors: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """The same for each vector and its tensor."""
    for vector, tensor in zip(vectors, tensors, strict=True):
        put_back(vector, tensor)


def nbytes(*tensors: torch.Tensor) -> int:
    """The bytes of all these tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
