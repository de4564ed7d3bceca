"""The `.grad` of a local shard: a part of a gradient, which must not be taken for the whole one.

Lesson: fully_sharded
"""

from typing import Any

import torch
import torch.distributed as dist

from minidist.common.norm import norms_over_ranks

CHANGED = (
    "was changed after a pass within no_sync(). There it is only a part of this rank's gradient, "
    "which is not reduced yet. Scale the loss instead, or change .grad after the pass that reduces"
)

# The ranks that have the shards of a gradient, and the device by which they communicate. None: it
# is not reduced yet.
Shared = tuple[dist.ProcessGroup, torch.device]


class ShardGradient(torch.Tensor):
    """An ordinary tensor but for its norm. `torch.nn.utils.clip_grad_norm_` gets that of the whole
    gradient, over the ranks that have its shards. Other norms, which optimizers take, are refused:
    ranks that scale by the norms of their own shards scale differently."""

    shared: Shared | None

    @classmethod
    def of(cls, shard: torch.Tensor, shared: Shared | None) -> "ShardGradient":
        """The same memory, as a ShardGradient."""
        new = shard.as_subclass(cls)
        new.shared = shared
        return new

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raises RuntimeError for a norm that is not torch's clipping."""
        name = func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name in ("linalg_vector_norm", "_foreach_norm") and len(args) == 2 and not kwargs:
                return _norms(func, *args)
            if name.endswith("norm"):
                raise RuntimeError(
                    "this .grad is only a rank's shard of a gradient, and so its norm is another "
                    "one on each rank. Clip by clip_grad_norm_ of the FullyShardedDataParallel, or "
                    "by torch.nn.utils. Optimizers that take norms (LARS, Muon) do not work"
                )
            result = func(*args, **(kwargs or {}))
            if name == "clone" or name.endswith("_like") or not isinstance(result, torch.Tensor):
                return result  # states of optimizers are ordinary tensors
            source = args[0]
            ours = isinstance(source, cls) and result.numel() == source.numel()
            return cls.of(result, source.shared) if ours and result is not source else result


def _norms(func: Any, shards: Any, norm_type: float) -> Any:
    """What `func` gives for whole gradients. All ranks call it for the same ones."""
    several = isinstance(shards, list | tuple)
    shards = list(shards) if several else [shards]
    if any(shard.shared is None for shard in shards):
        raise RuntimeError("clip_grad_norm_ before the pass that reduces, after no_sync()")
    group, device = shards[0].shared
    plain = [shard.as_subclass(torch.Tensor) for shard in shards]
    norms = norms_over_ranks(plain, norm_type, group, device)
    return norms if several else norms[0]
