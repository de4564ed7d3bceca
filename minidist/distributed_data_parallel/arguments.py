"""The arguments of torch's DistributedDataParallel: what they mean here, or why not."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

NOT_HERE = {
    "dim": "inputs are not cut here. Give each rank its own share of the batch",
    "delay_all_reduce_named_params": "all gradients leave in buckets",
    "param_to_hook_all_reduce": "all gradients leave in buckets",
    "mixed_precision": "use torch.autocast, and a communication hook for the gradients",
    "skip_all_reduce_unused_params": "a parameter that is never used can be frozen instead",
    "bucket_cap_mb_list": "all buckets are of bucket_cap_mb, but for the first",
}


def require_supported(**arguments: Any) -> None:
    """Raises ValueError, with the reason, for the first argument that makes no sense here."""
    for name, value in arguments.items():
        if value:
            raise ValueError(
                f"DistributedDataParallel: {name}={value!r} is not there: {NOT_HERE[name]}"
            )


def device_of(
    module: nn.Module, device_ids: Sequence[Any] | None, output_device: Any
) -> torch.device | None:
    """Where inputs are to be moved: the device that is named by both; None names none.

    Raises TypeError or ValueError unless they are None or name the one device of the module.
    """
    if device_ids is not None and not isinstance(device_ids, list | tuple):
        raise TypeError(f"device_ids is None or a list of one device, not {device_ids!r}")
    if len(device_ids or ()) > 1:
        raise ValueError(
            f"device_ids={list(device_ids or ())}: a rank has one device. Start a rank for each"
        )
    named = [*(device_ids or ()), *([] if output_device is None else [output_device])]
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
