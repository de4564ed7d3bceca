"""The wrapper: what the ranks do before and after a forward pass."""

from collections.abc import Sequence
from operator import methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from minidist.common.groups import groups_of, require_group
from minidist.common.no_sync import Synchronized
from minidist.common.refusals import refuse
from minidist.common.replicas import broadcast_state, require_same_model
from minidist.common.wrapper import Guard, copy_on_ranks
from minidist.distributed_data_parallel.buckets import BUCKET_CAP_MB, Buckets, assign
from minidist.distributed_data_parallel.hooks import CommHook
from minidist.distributed_data_parallel.join import UnevenBatches
from minidist.distributed_data_parallel.reducer import Reducer

NOT_HERE = {  # of torch's arguments
    "dim": "inputs are not cut here. Give each rank its own share of the batch",
    "delay_all_reduce_named_params": "all gradients leave in buckets",
    "param_to_hook_all_reduce": "all gradients leave in buckets",
    "mixed_precision": "use torch.autocast, and a communication hook for the gradients",
    "skip_all_reduce_unused_params": "a parameter that is never used can be frozen instead",
    "bucket_cap_mb_list": "all buckets are of bucket_cap_mb, but for the first",
}


class DistributedDataParallel(Synchronized, UnevenBatches):
    """Trains replicas of `module`, one on each rank of a group, as one model.

        model = md.DistributedDataParallel(model)       # then train as on one process:
        loss_fn(model(my_share), my_targets).backward()
        optimizer.step()                                # each .grad is the mean over all ranks

    At construction every rank takes rank 0's parameters and buffers. When `backward()` returns,
    each `.grad` is the mean over the ranks, and a view into a bucket, whose memory the next
    gradients take: clone one to keep it. The arguments are those of torch's class, in its order:

    device_ids, output_device: None, or the one device of the module. If it is named, inputs are
        moved to it. A module on the CPU is there whatever the number.
    broadcast_buffers: the first forward pass, and each that follows one for training, first gives
        every rank rank 0's buffers, such as the running means of batch norm. False: they are never
        broadcast. forward_sync_buffers: the same, but False broadcasts them at construction still.
    init_sync: False broadcasts nothing at construction, and compares nothing: the ranks' models
        must be the same then.
    process_group: the ranks that take part; None is the default group. Or device_mesh, of one axis.
    bucket_cap_mb: a bucket is full at so many MiB (the first one at 1 MiB); None is 25.
    find_unused_parameters: a parameter may be left without gradient by a backward pass. Left out
        on some ranks, it counts there as zero; on all, its `.grad` stays as it was. Costs a small
        message a pass, and the overlap of the buckets that wait for such a parameter.
    static_graph: allows the same.
    gradient_as_bucket_view, batched_grad_copy, check_reduction: change nothing.
    dim, mixed_precision and the other three: refused, with the reason.

    `copy.deepcopy` and `torch.save` give a wrapper whose gradients are averaged too, without the
    communication hook. Only one in the default group can be saved: other groups cannot be pickled.

    Raises RuntimeError without a process group; ValueError, on every rank, if the ranks have
    different models or nothing to train; TypeError for DTensor parameters. `forward` raises
    RuntimeError if a parameter has changed since (see `minidist.common.wrapper`); `backward`,
    if one is left without gradient unasked, or is in two wrappers that the pass goes through, or
    has one by a layer that was reached through the wrapper, past its forward pass. The module's
    methods are `model.module`'s alone: what they compute is not averaged.
    """

    bucket_cap_mb: float
    find_unused_parameters: bool
    broadcast_buffers: bool

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Any = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        Synchronized.__init__(self, module)
        UnevenBatches.__init__(self)
        given = locals()
        refuse("DistributedDataParallel", {name: given[name] for name in NOT_HERE}, NOT_HERE)
        self.bucket_cap_mb = BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb
        if self.bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb must be more than 0, not {bucket_cap_mb}")
        self.device = next(module.parameters(), torch.empty(0)).device
        self._inputs_go_to = _device_of(module, device_ids, output_device)
        (self.process_group,) = groups_of(process_group, device_mesh, "DistributedDataParallel")
        self.find_unused_parameters = find_unused_parameters or static_graph
        broadcast = broadcast_buffers is not False
        self.broadcast_buffers = broadcast if forward_sync_buffers is None else forward_sync_buffers
        self._stale_buffers = self.broadcast_buffers  # rank 0 may change some until the first pass
        if init_sync:
            require_same_model(module, self.process_group)
            buffers = module.buffers() if broadcast or forward_sync_buffers is not None else []
            broadcast_state([*module.parameters(), *buffers], self.process_group)
        self._watch()

    def _watch(self) -> None:
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError("DistributedDataParallel: the module has no parameter to train")
        self._guard = Guard(self.module, "DistributedDataParallel")
        # Backward comes to the last layer first.
        buckets = Buckets(self._plan(list(trained.values())[::-1]), self.process_group)
        unused = self.find_unused_parameters
        self._reducer = Reducer(self, trained, self.process_group, buckets, unused)

    def _plan(self, parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        return assign(parameters, int(self.bucket_cap_mb * 2**20))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own, between what the ranks do together before and after."""
        if self._reducer.begun:  # computed again within its backward pass, by a checkpoint
            return self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():
            self._guard.require_unchanged(self.module)
        Join.notify_join_context(self)
        self._begin_step(torch.is_grad_enabled() and self.require_backward_grad_sync)
        if self._inputs_go_to is not None:
            move = methodcaller("to", self._inputs_go_to, non_blocking=True)
            inputs, kwargs = tree_map_only(torch.Tensor, move, (inputs, kwargs))
        output = self.module(*inputs, **kwargs)
        self._reducer.watch(output)
        return output

    def _begin_step(self, sync: bool, trains: bool = True) -> bool:
        """What the ranks do together before a forward pass. `trains`: this one still has batches.
        Returns whether they will average after it."""
        rebuild, broadcast = sync and self._reducer.may_rebuild, self._stale_buffers
        source, contributors = 0, dist.get_world_size(self.process_group)
        if self._join_config.enable:
            there, wishes = self._vote(trains, sync, rebuild, broadcast)
            (sync, rebuild, broadcast), source = wishes, there[0]
            if not self._divide_by_initial_world_size:
                contributors = len(there)
        if rebuild:
            self._reducer.buckets.arrange(self._plan(self._reducer.order_on(source)))
        if broadcast and (buffers := list(self.module.buffers())):
            broadcast_state(buffers, self.process_group, source)
        self._stale_buffers = sync and self.broadcast_buffers
        if torch.is_grad_enabled():  # an evaluation in between changes nothing
            self._reducer.expect(sync, contributors)
        return sync

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let `hook(state, bucket)` average the buckets, instead of an all_reduce. As in torch it
        returns a Future of the average, of shape (n,), and divides by the world size itself."""
        buckets = self._reducer.buckets
        if buckets.comm_hook is not None:
            raise RuntimeError("a communication hook is registered already")
        if not callable(hook):
            raise TypeError(f"a communication hook is a function, not {type(hook).__name__}")
        buckets.comm_hook = hook, state

    # ---- copies ----------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy_on_ranks(self, memo, self.process_group)

    def __getstate__(self) -> dict[str, Any]:
        """What `copy.deepcopy` and `torch.save` take: not what belongs to this process alone."""
        state = {k: v for k, v in vars(self).items() if k not in ("_guard", "_reducer")}
        if self.process_group is dist.group.WORLD:
            state["process_group"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.process_group = require_group(self.process_group, "DistributedDataParallel")
        self._watch()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.process_group is not dist.group.WORLD:
            raise TypeError(
                "a DistributedDataParallel can be saved if its group is the default one. Save its "
                "state_dict() or its module"
            )
        return super().__reduce_ex__(protocol)


def _device_of(
    module: nn.Module, device_ids: Sequence[Any] | None, output_device: Any
) -> torch.device | None:
    """Where inputs are to be moved: the device that is named by both; None names none.

    Raises TypeError or ValueError unless they are None or name the one device of the module.
    """
    if device_ids is not None and not isinstance(device_ids, list | tuple):
        raise TypeError(f"device_ids is None or a list of one device, not {device_ids!r}")
    ids = list(device_ids or ())
    if len(ids) > 1:
        raise ValueError(f"device_ids={ids}: a rank has one device. Start a rank for each")
    named = [device for device in (*ids, output_device) if device is not None]
    found = {parameter.device for parameter in module.parameters()}
    for device in named:
        if len(found) != 1 or not _is(next(iter(found)), device):
            there = ", ".join(sorted(map(str, found)))
            raise ValueError(f"device {device!r} was named, but the module is on {there}")
    return next(iter(found)) if named else None


def _is(device: torch.device, name: Any) -> bool:
    """Whether this is the device of that name. A number alone has no kind; the CPU no number."""
    if isinstance(name, int):
        return device.type == "cpu" or device.index == name
    named = torch.device(name)
    return named.type == device.type and named.index in (None, device.index)
