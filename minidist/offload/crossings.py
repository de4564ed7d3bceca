"""Bytes that travel between an emulated device and the host (lesson: offload)."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minidist.common.tensors_in import tensors_of
from minidist.measure.storages import is_wrapper


class Crossings(TorchDispatchMode):
    """Counts the bytes that ops read on one side and write on the other, in a `with` block.

        with md.offload.Budget(10**9, model, optimizer), md.offload.Crossings() as crossed:
            optimizer.step()
        print(crossed.to_host, crossed.to_device)       # bytes

    Use it within a `Budget`, which says what is on the host. Lesson: offload.
    """

    def __init__(self) -> None:
        super().__init__()
        self.to_host = self.to_device = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented  # a DTensor: its own ops, on what it holds, come here next
        result = func(*args, **(kwargs or {}))
        if "_like" in str(func) or ".new_" in str(func):
            return result  # reads a tensor's shape, not its values
        written = {x.untyped_storage()._cdata: x for x in tensors_of(result)}
        sides = {_on_host(x) for x in written.values()}
        for x in tensors_of((args, kwargs)):
            if x.untyped_storage()._cdata in written:
                continue
            if _on_host(x) and False in sides:
                self.to_device += x.nbytes
            elif not _on_host(x) and True in sides:
                self.to_host += x.nbytes
        return result


def _on_host(tensor: torch.Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "on_host", False)
