"""A device whose speed is taken from one measured step, to predict others. Lesson: scaling_out"""

from collections.abc import Callable
from dataclasses import replace

from minidist.planner.device import Device


def calibrated(device: Device, predict: Callable[[Device], float], seconds: float) -> Device:
    """The device with the `utilisation` for which `predict(device)` is `seconds`: a step that was
    measured. What it then says of other steps is a prediction; of this one it is none.
    Lesson: scaling_out.

    Raises ValueError if no utilisation gives it: the messages alone take longer, or a device at its
    peak is still slower.
    """
    low, high = 1e-4, 1.0
    slow, fast = (predict(replace(device, utilisation=each)) for each in (low, high))
    if not fast <= seconds <= slow:
        raise ValueError(f"no utilisation makes it {seconds:.3g} s: at its peak it is {fast:.3g} s")
    for _ in range(60):
        middle = (low + high) / 2
        if predict(replace(device, utilisation=middle)) > seconds:
            low = middle
        else:
            high = middle
    return replace(device, utilisation=high)
