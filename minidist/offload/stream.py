"""An optimizer on the host, and copies beside what the device computes (lesson: offload)."""

import weakref
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from minidist.common.tensors_in import local_of
from minidist.offload.budget import on_host, put_on_host
from minidist.zero.sharded_optimizer import is_elementwise


class CopyStream:
    """Copies from a device to the host while the device computes. On a CPU it copies at once."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._device, self._stream = device, self._module.Stream(device)

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Begin as soon as the device has computed `source`. Returns the target."""
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
        if source.device.type != "cpu":
            local_of(source).record_stream(self._stream)  # nobody gets its memory before that
        return target

    def wait(self) -> None:
        """The host waits until all copies so far have arrived."""
        event = self._module.Event()
        event.record(self._stream)
        event.synchronize()


def pinned(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Memory on the host that a device can copy from and to by itself."""
    with on_host():
        pins = like.device.type != "cpu" or local_of(like).is_pinned()
        return torch.empty_like(like, dtype=dtype, device="cpu", pin_memory=pins)


class OffloadedOptimizer(Optimizer):
    """An optimizer that lives on the host, for parameters on a device. ZeRO-Offload.

        optimizer = md.OffloadedOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)

    A step fetches the gradients in `.grad`, updates the host's copies of the parameters, and sends
    these back. Parameters of 16 bits have a copy, gradients and states in float32. Use it as any
    optimizer: with schedulers, `DistributedDataParallel`, `fully_shard` or `Pipeline`. With ZeRO,
    stage 1 or 2, a host has its ranks' shards:

        adam = md.OffloadedOptimizer.of(torch.optim.Adam)
        optimizer = md.ZeroRedundancyOptimizer(model.parameters(), adam, lr=1e-3)

    `state` and `state_dict()` are those of the bare optimizer, on the CPU, and load in it. Each
    step begins with the parameters, so a change of them between two steps is seen. `shards` are
    the copies; their `.grad` is what `receive_in_backward` has fetched. Lesson: offload.

    Limits: all groups are given at the start. No LBFGS; no sparse gradients; no `deepcopy` and no
    `pickle`: save its `state_dict()`. What a copy has beyond 16 bits is in no checkpoint. An error
    in a step leaves states as they are then. Loaded states may have other shapes, as in torch.
    """

    def __init__(self, params: Any, optimizer_class: type[Optimizer], **defaults: Any) -> None:
        super().__init__(params, defaults)
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._kinds = {p: (p.device, p.dtype) for p in parameters}
        self._streams = {p.device: CopyStream(p.device) for p in parameters}
        self._arriving: dict[nn.Parameter, torch.Tensor] = {}  # gradients
        self._masters = own = {p: _master(p) for p in parameters}
        put_on_host(dict(own))
        groups = [{**g, "params": [own[p] for p in g["params"]]} for g in self.param_groups]
        self.inner: Any = optimizer_class(groups, **defaults)  # it trains the masters
        self.defaults = self.inner.defaults
        self._take()

    @staticmethod
    def of(optimizer_class: type[Optimizer]) -> type["OffloadedOptimizer"]:
        """The class of such optimizers, for what wants a class: `ZeroRedundancyOptimizer`."""

        class Offloaded(OffloadedOptimizer):
            elementwise = is_elementwise(optimizer_class)
            __init__ = partialmethod(OffloadedOptimizer.__init__, optimizer_class=optimizer_class)

        return Offloaded

    @property
    def shards(self) -> list[nn.Parameter]:
        """The host's copies of the parameters, as parameters."""
        self._wait()
        return list(self._masters.values())

    def receive_in_backward(self) -> None:
        """From now on each gradient leaves the device as soon as backward has made it, and they add
        up on the host until the next step: call `zero_grad()` of this optimizer, and clip the
        `.grad` of `shards`. Not with `DistributedDataParallel`, which averages what is there."""
        me = weakref.ref(self)

        def leave(parameter: Any) -> None:
            if optimizer := me():
                optimizer._receive(parameter)
                parameter.grad = None

        for parameter in self._masters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(leave)

    @torch.no_grad()
    def _receive(self, p: Any) -> None:
        """Begin to fetch its gradient."""
        if p in self._arriving:
            self._wait()
        target = pinned(self._masters[p], p.grad.dtype)
        self._arriving[p] = self._streams[p.device].fetch(target, p.grad)
        if self._masters[p].grad is not None:  # of an earlier pass
            self._wait()

    def _wait(self) -> None:
        """Until all have come. Those of 16 bits add up in float32: 16 lose what is small."""
        for stream in self._streams.values():
            stream.wait()
        with on_host():
            for parameter, came in self._arriving.items():
                own = self._masters[parameter]
                own.grad = came.to(own.dtype) if own.grad is None else own.grad.add_(came)
        self._arriving.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the parameters, and of what the host has received."""
        super().zero_grad(set_to_none)
        self._arriving.clear()
        self.inner.zero_grad()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Fetch gradients, update on the host, and send the parameters back."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._wait()
        for parameter, own in self._masters.items():
            if (parameter.device, parameter.dtype) != self._kinds[parameter]:
                raise RuntimeError(
                    "a parameter has been moved or converted since the optimizer was made. Change "
                    "a model first, and make its optimizer then"
                )
            if parameter.grad is not None:
                if own.grad is not None:
                    raise RuntimeError(
                        "a .grad was written after receive_in_backward had taken it: by a wrapper "
                        "that averages gradients? Leave it out then, and let step() fetch"
                    )
                self._receive(parameter)
        self._wait()
        with torch.no_grad(), on_host():
            changed = {p: own for p, own in self._masters.items() if own.grad is not None}
            for p, own in changed.items():
                # A clamp, a checkpoint or a broadcast may have changed it, and p.data.clamp_()
                # leaves no trace: so it is read each time, for one more copy to the host.
                now = own if own.dtype == p.dtype else pinned(own, p.dtype)
                self._streams[p.device].fetch(now, p)
                self._wait()
                if now is not own:  # what is as it was sent keeps the bits of the host
                    own.copy_(torch.where(own.to(now.dtype) == now, own, now.to(own.dtype)))
            self.inner.load_state_dict(self.state_dict())  # torch casts states to float32
            self.inner.step()
            self.inner.zero_grad()
            for p, own in changed.items():  # rounded here, so that 16 bits travel
                sent = own if own.dtype == p.dtype else pinned(own, p.dtype).copy_(own)
                p.copy_(sent, non_blocking=True)
        self._take()
        return loss

    def _take(self) -> None:
        """The inner optimizer's options and states."""
        for mine, its in zip(self.param_groups, self.inner.param_groups, strict=True):
            mine.update({name: value for name, value in its.items() if name != "params"})
        found = self.inner.state
        self.state.clear()
        self.state.update({p: found[own] for p, own in self._masters.items() if own in found})
        put_on_host(dict(self.state))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a `state_dict` of this or of the bare optimizer."""
        with on_host():
            self.inner.load_state_dict(state_dict)
        self._take()


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """Its copy on the host: in float32 if the device has 16 bits."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return nn.Parameter(pinned(parameter, dtype).copy_(parameter.detach()), parameter.requires_grad)
