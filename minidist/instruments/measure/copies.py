"""Copies of tensors within a process, and cores at work (lesson: data_parallel)."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minidist.instruments.measure.storages import is_wrapper


class CopyCounter(TorchDispatchMode):
    """Counts the bytes of tensors that are copied as a whole, by `clone` or `to`.

        with md.measure.CopyCounter() as copies:
            model(x)
        copies.nbytes

    `torch.cat` and `stack`, which write several tensors into a new one, do not count. Operations of
    other threads do not, either. Lesson: data_parallel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented  # a DTensor: its own ops, on what it holds, come here next
        result = operation(*args, **(kwargs or {}))
        if operation in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self.nbytes += result.nbytes
        return result


def cores_at_work(work: Callable[[Any], object], inputs: Sequence[Any], rounds: int = 7) -> float:
    """Call `work` on each input at once, in a thread of its own: how many cores this process kept
    at work meanwhile (its processor time for each second on the clock), the most of several rounds.
    Lesson: data_parallel."""
    most = 0.0
    with ThreadPoolExecutor(len(inputs)) as threads:
        for _ in range(rounds):
            start, cpu_start = time.perf_counter(), time.process_time()
            list(threads.map(work, inputs))
            seconds = time.perf_counter() - start
            most = max(most, (time.process_time() - cpu_start) / seconds)
    return most
