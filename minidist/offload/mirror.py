"""A parameter on the device, its copy on the host, and the traffic between both."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from minidist.common.tensors_in import local_of
from minidist.offload.budget import OutOfMemory, on_host, put_on_host


class CopyStream:
    """Copies between a device and the host, one after the other, while the device computes. On a
    CPU torch's streams do nothing."""

    def __init__(self, device: torch.device) -> None:
        found: Any = torch.get_device_module(device)
        self._module: Any = found if hasattr(found, "Stream") else torch.cpu
        self._device, self._stream = device, self._module.Stream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy as soon as the device has computed `source`."""
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
        if source.device.type != "cpu":
            source.record_stream(self._stream)  # its memory is not to be used again before

    def host_waits(self) -> None:
        """Wait until all copies so far have arrived."""
        event = self._module.Event()
        event.record(self._stream)
        event.synchronize()

    def device_waits(self) -> None:
        """What the device computes from now on waits for the copies so far."""
        self._module.current_stream(self._device).wait_stream(self._stream)


copy_stream = cache(CopyStream)  # one for each device


class Mirror:
    """The host's side of one parameter. The optimizer trains `master`, a parameter too: in float32
    if the device has 16 bits. What travels goes through `buffer`, in the device's dtype. Of a
    DTensor the master is one as well, and what travels are this rank's rows."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter, self.stream = parameter, copy_stream(parameter.device)
        narrow = parameter.dtype in (torch.float16, torch.bfloat16)
        self.buffer = _empty(local_of(parameter), parameter.dtype)
        own = _empty(self.buffer, torch.float32 if narrow else parameter.dtype)
        self.master = nn.Parameter(self._whole(own), requires_grad=parameter.requires_grad)
        self._kind = parameter.dtype, parameter.shape
        self.gradients = 0  # that have come since the last step
        self._sent = False  # whether the parameter was last written from the master

    def _whole(self, own: torch.Tensor) -> torch.Tensor:
        """As the parameter is: a DTensor of these rows, or themselves."""
        like: Any = self.parameter
        if not isinstance(like, DTensor):
            return own
        spec: Any = like._spec
        meta = spec.tensor_meta._replace(dtype=own.dtype)
        return DTensor(own, replace(spec, tensor_meta=meta), requires_grad=False)

    def receive(self, gradient: torch.Tensor) -> None:
        """Begin to fetch a gradient, and add it to those that are here."""
        like: Any = self.parameter
        if isinstance(gradient, DTensor) and gradient.placements != like.placements:
            gradient = gradient.redistribute(placements=like.placements)
        gradient = local_of(gradient)
        target = _empty(self.buffer, self.buffer.dtype) if self.gradients else self.buffer
        self.stream.copy(target, gradient)
        if target is not self.buffer:
            self.stream.host_waits()
            self.show_gradient()  # in float32: a sum in 16 bits loses what is small
            local_of(self.master.grad).add_(target)  # type: ignore[arg-type]
        self.gradients += 1

    def show_gradient(self) -> None:
        """Give the master the gradient that has been fetched. The copies must have arrived."""
        if self.gradients and self.master.grad is None:
            own = self.buffer
            if self.master.dtype != own.dtype:
                own = _empty(own, self.master.dtype).copy_(own)
            self.master.grad = self._whole(own)

    def forget_gradient(self) -> None:
        self.gradients, self.master.grad = 0, None

    def read(self) -> None:
        """Begin to copy the parameter to the master: a checkpoint, an average, a clamp or a
        broadcast may have changed it. `p.data.clamp_()` leaves no trace, so it is read each time,
        at the price of one more copy to the host. In 16 bits, an element that is as it was sent
        keeps the bits that only the host has.
        """
        master, source = local_of(self.master).detach(), local_of(self.parameter).detach()
        if master.dtype == source.dtype:
            self.stream.copy(master, source)
            return
        now = _empty(source, source.dtype)
        self.stream.copy(now, source)
        self.stream.host_waits()
        if not self._sent:
            master.copy_(now)
            return
        with on_host():
            as_sent = master.to(now.dtype) == now
            torch.where(as_sent, master, now.to(master.dtype), out=master)

    def write(self) -> None:
        """Begin to send the master to the device."""
        source = local_of(self.master).detach()
        if source.dtype != self.buffer.dtype:
            source = self.buffer.copy_(source)  # here, so that it travels in half the bytes
        self.stream.copy(local_of(self.parameter), source)
        self._sent = True

    def forget(self) -> None:
        """At the next step take the parameter, whatever the master is."""
        self._sent = False

    def require_unchanged(self) -> None:
        """Raises RuntimeError if the parameter is another kind of tensor than it was, or has a
        gradient beside the one that has left."""
        gradient = self.parameter.grad  # raises for one that a strategy has replaced by shards
        if (self.parameter.dtype, self.parameter.shape) != self._kind:
            raise RuntimeError(
                "a parameter has been converted since the optimizer was made. Change a model "
                "first, and make its optimizer then"
            )
        if gradient is not None and self.gradients:  # torch's DDP hides its hooks, and comes later
            raise RuntimeError(
                "a parameter's .grad was written after receive_in_backward had taken it: by a "
                "wrapper that averages gradients? Leave it out then, and let step() fetch"
            )
        if gradient is not None and gradient.layout is not torch.strided:
            raise RuntimeError("a sparse gradient cannot be offloaded: sparse=True")


def _empty(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Memory on the host, laid out as `like`. Pinned, where the device can then copy by itself."""
    pinned = like.device.type not in ("cpu", "mps")
    try:
        with on_host():
            made = torch.empty_like(like, dtype=dtype, device="cpu", pin_memory=pinned)
    except RuntimeError as error:
        nbytes = like.numel() * dtype.itemsize
        raise OutOfMemory(f"no room on the host for {nbytes:,} bytes more") from error
    put_on_host(made)
    return made.detach()
