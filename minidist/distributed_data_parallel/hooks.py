"""Communication hooks: what is done with a bucket instead of a plain all_reduce.

They have torch's form, hook(state, bucket) -> Future of a tensor, so they serve torch's own
DistributedDataParallel too, and torch's hooks serve ours. `state` is the process group, or None, or
for the hooks that remember something (`low_bit_hooks`, `power_sgd`) an object of their own.
(Torch looks at the annotation of `bucket`, and takes bfloat16 hooks only with NCCL.)
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def bf16_compress_hook(
    state: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients as bfloat16: half the bytes of float32, and 8 bits of its 24."""
    full = bucket.buffer()  # (n,)
    compressed = (full / dist.get_world_size(state)).to(torch.bfloat16)
    work = dist.all_reduce(compressed, group=state, async_op=True)
    assert work is not None
    return work.get_future().then(lambda reduced: full.copy_(reduced.value()[0]))


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
