"""The wrapper: what the ranks do before and after a forward pass."""

import copy
from collections.abc import Sequence
from inspect import ismethod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves, tree_map_only

from minidist.common.groups import require_group
from minidist.common.no_sync import Synchronized
from minidist.common.replicas import broadcast_state, require_same_model
from minidist.common.wrapper import in_backward, kinds_of, require_as_found
from minidist.distributed_data_parallel.buckets import BUCKET_CAP_MB, Buckets, CommHook, assign
from minidist.distributed_data_parallel.reducer import Reducer


class DistributedDataParallel(Synchronized):
    """Trains replicas of `module`, one on each rank of a group, as one model.

        model = md.DistributedDataParallel(model)       # then train as on one process:
        loss_fn(model(my_share), my_targets).backward()
        optimizer.step()                                # each .grad is the mean over all ranks

    At construction every rank takes rank 0's parameters and buffers. Each backward pass from what
    the wrapper has returned, outside of `no_sync`, leaves the mean over the ranks in `.grad`: a
    view into a bucket, whose memory the next gradients take. Clone one to keep it. The arguments
    are those of torch's class that ordinary scripts pass:

    device_ids: None, or one device: inputs are then moved to that of the module.
    output_device: changes nothing.
    broadcast_buffers: the first forward pass, and each that follows one whose gradients are
        averaged, first gives every rank rank 0's buffers, such as the running means of batch norm.
    process_group: the ranks that take part; None is the default group.
    bucket_cap_mb: a bucket is full at so many MiB (the first one at 1 MiB); None is 25.
    find_unused_parameters: a parameter may be left without gradient by a backward pass. Left out
        on some ranks, it counts there as zero; on all, its `.grad` stays as it was. Costs a small
        message a pass, and the overlap of the buckets that wait for such a parameter.

    Parameters and buffers that torch's `_set_params_and_buffers_to_ignore_for_model` has named are
    left as they are on each rank.

    Raises RuntimeError without a process group; ValueError, on every rank, if the ranks have
    different models or nothing to train; TypeError for DTensor parameters. `forward` raises
    RuntimeError if a parameter has changed since; `backward`, if one is left without gradient
    unasked.

    Limits: what `model.module` or a layer of it computes on its own is not averaged.
    Hooks that change a gradient come before the wrapper. Of several wrappers of a model the last
    one averages. Of outputs in a class that torch's pytree does not know, only the first backward
    pass after a forward pass is averaged. `copy.deepcopy` copies the module alone. A wrapper cannot
    be pickled. Ranks with different numbers of batches: torch's class has `join`.
    """

    _make_buckets: Any = Buckets

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        *,
        broadcast_buffers: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__(module)
        self.process_group = group = require_group(process_group, "DistributedDataParallel")
        if device_ids and len(device_ids) > 1:
            raise ValueError(f"device_ids={device_ids}: a rank has one device. Start one for each")
        self._cap = BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb
        self._left_out = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        named = module.named_parameters()
        trained = {n: p for n, p in named if p.requires_grad and n not in self._left_out}
        require_same_model(module, group, self._left_out)
        if any(isinstance(each, DistributedDataParallel) for each in module.modules()):
            raise ValueError("a part of this module is wrapped already: wrap the model once")
        if not trained:
            raise ValueError("DistributedDataParallel: the module has no parameter to train")
        common = [p for n, p in module.named_parameters() if n not in self._left_out]
        broadcast_state([*common, *self._common_buffers()], group)
        self.device, self._moves_inputs = next(iter(trained.values())).device, bool(device_ids)
        self._broadcasts = self._stale = broadcast_buffers  # rank 0 may change some until a pass
        self._found = kinds_of(trained.items())
        # Backward comes to the last layer first.
        buckets = self._make_buckets(self._plan(list(trained.values())[::-1]), group)
        self._reducer = Reducer(trained, group, buckets, find_unused_parameters)

    def _plan(self, parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        return assign(parameters, int(self._cap * 2**20))

    def _common_buffers(self) -> list[torch.Tensor]:
        return [b for name, b in self.module.named_buffers() if name not in self._left_out]

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if ismethod(found) and found.__self__ is self.module:
            raise AttributeError(
                f"what {name}() computes alone would not be averaged: call it in forward, or "
                f"model.module.{name}() on this rank alone"
            )
        return found

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own, between what the ranks do together before and after."""
        if in_backward():  # computed again, by a checkpoint
            return self.module(*inputs, **kwargs)
        trains = torch.is_grad_enabled()
        sync = trains and self.require_backward_grad_sync
        if trains:
            require_as_found(self.module, self._found, self._left_out)
        if sync and self._reducer.may_rebuild:
            self._reducer.buckets.arrange(self._plan(self._reducer.order_on_rank_0()))
        if self._stale and (buffers := self._common_buffers()):
            broadcast_state(buffers, self.process_group)
        self._stale = sync and self._broadcasts
        if trains:  # an evaluation in between changes nothing
            self._reducer.expect(sync)
        if self._moves_inputs:
            inputs, kwargs = tree_map_only(torch.Tensor, self._move, (inputs, kwargs))
        with record_function("ddp.forward"):
            output = self.module(*inputs, **kwargs)
        if sync:
            for tensor in filter(torch.is_tensor, tree_leaves(output)):
                self._reducer.watch(tensor)
        return output

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let `hook(state, bucket)` average the buckets, instead of an all_reduce. As in torch it
        returns a Future of the average, of shape (n,), and divides by the world size itself."""
        self._reducer.buckets.comm_hook = hook, state

    def bucket_names(self) -> list[list[str]]:
        """Which parameters are in which bucket, in the order in which the buckets travel. Lesson:
        distributed_data_parallel."""
        return self._reducer.bucket_names()

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy of the module, such as an average of weights: to train it, wrap it too."""
        return copy.deepcopy(self.module, memo)
