"""A forward pass that is computed a second time, for backward."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn


class Replay:
    """What a forward pass depends on besides weights and inputs, as it is now: the state of the
    random numbers, so that dropout drops the same elements again, and that of autocast; and what it
    changes: buffers, such as the running means of batch norm, which a second pass must not move a
    second time."""

    def __init__(self, module: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        self._module = module
        devices = {x.device for x in inputs if x.device.type not in ("cpu", "meta")}
        self._device_states = [
            (device, torch.get_device_module(device).get_rng_state(device)) for device in devices
        ]
        self._cpu_state = torch.get_rng_state()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted({"cpu", *(device.type for device in devices)})
        ]

    @contextmanager
    def same_again(self) -> Iterator[None]:
        """Within the block random numbers and autocast are those of the first pass; after it,
        random numbers and buffers are what they were before it."""
        slots = [(module._buffers, dict(module._buffers)) for module in self._module.modules()]
        buffers = [(buffer, buffer.clone()) for buffer in self._module.buffers()]
        with ExitStack() as block:
            block.enter_context(torch.random.fork_rng([]))
            torch.set_rng_state(self._cpu_state)
            for device, state in self._device_states:
                module = torch.get_device_module(device)
                block.callback(module.set_rng_state, module.get_rng_state(device), device)
                module.set_rng_state(state, device)
            for kind, dtype, enabled in self._autocast:
                block.enter_context(torch.autocast(kind, dtype, enabled))
            try:
                yield
            finally:
                for slot, held in slots:  # forward may have put other tensors there
                    for name, tensor in held.items():
                        slot[name] = tensor
                for buffer, before in buffers:
                    buffer.data.copy_(before)  # unseen by autograd, which may have saved it
