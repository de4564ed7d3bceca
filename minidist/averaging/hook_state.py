"""What communication hooks have in common that remember something from one step to the next. Their
`state` is an object of their own, where that of others is a process group
(lesson: beyond_gradients)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def require_state(state: object, kind: type) -> None:
    """Raises TypeError for another state than the hook's own: None, for instance."""
    if not isinstance(state, kind):
        raise TypeError(f"the hook's state is a {kind.__name__}, not {state!r:.60}")


class Remembering:
    """The state of a hook that keeps something from one step to the next, for each bucket."""

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, use_error_feedback: bool = True
    ) -> None:
        self.process_group, self.use_error_feedback = process_group, use_error_feedback
        self._kept: dict[int, tuple[list[int], Any]] = {}

    def kept(self, bucket: dist.GradBucket, make: Callable[[], Any]) -> Any:
        """What is kept for this bucket; `make()` where nothing is. Buckets are made anew after the
        first backward pass: what is kept of another one with the same number is forgotten."""
        parameters = [id(parameter) for parameter in bucket.parameters()]
        known, _ = self._kept.get(bucket.index(), ([], None))
        if known != parameters:
            self._kept[bucket.index()] = parameters, make()
        return self._kept[bucket.index()][1]


def done(result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A Future that has its result."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[result.device] if result.is_cuda else []
    )
    future.set_result(result)
    return future
