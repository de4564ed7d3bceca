"""Lesson: mixed_precision. Where 16 bits are enough, use 16; and what is lost by it.

`torch.autocast` runs matrix products in 16 bits, and keeps weights, their gradients and the
optimizer in 32. It is all that bfloat16 needs, on any device and in any strategy of the course (a
fully sharded unit does better by `param_dtype`, since the copies of autocast stay until backward):

    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_fn(model(x), y)
    loss.backward()

bfloat16 has the range of float32, and 8 bits of precision. float16 has 11, but ends at 65504 and
below 6e-8: small gradients become zero. So the loss is multiplied by a scale, and every gradient
with it; before the step they are divided by it again. A scale that is too large makes gradients
infinite: then the step is left out, and the scale is halved. After 2,000 steps without that, it is
doubled, and so it stays near the largest that works.
Micikevicius et al., "Mixed Precision Training" (arXiv 1710.03740), section 3.

Ranks that share out gradients each look at their own. If one finds an infinity, and it alone leaves
out the step, replicas part and collectives no longer match. So all must know: `ShardedGradScaler`.
"""

import torch
import torch.distributed as dist

from minidist import rank
from minidist.common.groups import require_group


class ShardedGradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for ranks that each have other gradients: if any of them finds one that
    is not finite, all leave out the step and lower the scale. Lesson: mixed_precision.

        scaler = md.ShardedGradScaler()
        with torch.autocast("cpu", torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)              # only to clip the gradients
        scaler.step(optimizer)
        scaler.update()

    It works with `DistributedDataParallel`, `ShardedDataParallel`, `Pipeline`, and with parameters
    that are sharded themselves. A rank may have no gradients.

    device: the kind of device that has the gradients, "cpu" or "cuda"; None is that of the rank's.
    process_group: the ranks that step together; None is the default group.
    These and the others are in the order of torch.distributed.fsdp's ShardedGradScaler. The methods
    are those of torch.amp.GradScaler. In a pipeline only the rank with the loss calls `scale`;
    every rank calls all else. Each optimizer's step costs one all_reduce of four numbers: in
    `unscale_` if you call it, else in `step`.

    Raises RuntimeError without a process group; TypeError for a device that is none; in `unscale_`
    or `step`, on every rank, RuntimeError if no rank has a gradient, or if the ranks have different
    scales, such as those of checkpoints of different steps: the weights are as before then.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(device, str | None):
            raise TypeError(f'device is "cpu", "cuda" or None, not {device!r}')
        self.process_group = require_group(process_group, "ShardedGradScaler")
        kind = device or rank.device().type
        super().__init__(kind, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale, and the steps since it changed: there also where no loss has been scaled, as
        in all but the last stage of a pipeline."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(rank.device())
        return super()._check_scale_growth_tracker(funcname)

    # Both ways to a step lead through here: that of `unscale_`, and that of an optimizer which
    # unscales within its own kernel (fused=True), for which this only looks.
    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Divide this rank's gradients by the scale. Returns, as 0 or more, whether any rank's were
        not finite."""
        mine = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return {found_inf.device: self._anywhere(list(mine.values()))}

    def _anywhere(self, mine: list[torch.Tensor]) -> torch.Tensor:
        """More than 0 if any rank has found something, on any of its devices."""
        scale, _ = self._check_scale_growth_tracker("unscale_")
        found = sum((each.to(scale.device) for each in mine), torch.zeros_like(scale))
        flags = torch.stack([found, found.new_tensor(len(mine)), scale, -scale])
        dist.all_reduce(flags, dist.ReduceOp.MAX, self.process_group)
        found, any_gradients, largest, negative_smallest = flags
        if largest != -negative_smallest:
            raise RuntimeError(
                f"the ranks' scales differ, from {-negative_smallest.item():g} to "
                f"{largest.item():g}: load the scaler's state of the same step on every rank"
            )
        if not any_gradients:
            raise RuntimeError(
                "no rank has a gradient to unscale: call scaler.scale(loss).backward() first, with "
                "the parameters of this optimizer"
            )
        return found
