"""Communication hooks: what is done with a bucket instead of a plain all_reduce.

They have torch's form, hook(state, bucket) -> Future of a tensor, so they serve torch's own
DistributedDataParallel too, and torch's hooks serve ours. `state` is the process group, or None.
(Torch looks at the annotation of `bucket`, and takes bfloat16 hooks only with NCCL.)
Lesson: ddp_in_practice.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

CommHook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]  # (state, bucket)


def bf16_compress_hook(
    state: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients as bfloat16: half the bytes of float32, and 8 bits of its 24."""
    full = bucket.buffer()  # (n,)
    compressed = (full / dist.get_world_size(state)).to(torch.bfloat16)
    work = dist.all_reduce(compressed, group=state, async_op=True)
    assert work is not None
    return work.get_future().then(lambda reduced: full.copy_(reduced.value()[0]))
