"""The idea, in twenty lines: the optimizer, and all that only it reads, is the host's.

    optimizer = NaiveOffload(model.parameters(), torch.optim.Adam, lr=1e-3)

A device with Adam holds 16 bytes a parameter; here 8, the parameter and its gradient. `stream.py`
adds copies beside what the device computes, 16 bits and checkpoints. Lesson: offload.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class NaiveOffload:
    """An optimizer of `optimizer_class`, for copies of the parameters on the host."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], optimizer_class: Any, **options: Any
    ) -> None:
        self.on_device = list(parameters)
        self.on_host = [nn.Parameter(p.detach().to("cpu", copy=True)) for p in self.on_device]
        self.optimizer = optimizer_class(self.on_host, **options)

    @torch.no_grad()
    def step(self) -> None:
        """Gradients down, a step on the host, parameters up. The gradients are used up."""
        for device, host in zip(self.on_device, self.on_host, strict=True):
            host.grad = None if device.grad is None else device.grad.cpu()
            device.grad = None
        self.optimizer.step()
        for device, host in zip(self.on_device, self.on_host, strict=True):
            device.copy_(host)
