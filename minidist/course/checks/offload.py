"""The puzzles and the exercise of the lesson offload."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from minidist.course.checks.verdict import check, function, puzzle, require_right, same, shown
from minidist.course.zoo import Block
from minidist.offload import Budget, Crossings

hidden = puzzle(__name__, "hidden")
longest_part = puzzle(__name__, "longest_part")


@check
def activations(answer: object) -> None:
    """Hooks that leave activations, and nothing else, with the host until backward."""
    require_right(_trial, function(answer), world_size=1, of_rank="")


def _trial(hooks: Callable[..., Any]) -> str:
    """What is wrong, if anything."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(32, 2) for _ in range(3)]).double()
    x = torch.randn(4, 32, 32, dtype=torch.float64)
    wanted, least, kept, _ = _measured(model, x, _counting(model))
    pair = hooks(model)
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(map(callable, pair))):
        return f"hooks(model) returns {shown(pair)}, not two functions"
    at_hand: list[bool] = []  # of what backward gets, whether it is on the host still

    def unpack(held: Any) -> Any:
        tensor = pair[1](held)
        at_hand.append(getattr(tensor.untyped_storage(), "on_host", False))
        return tensor

    found, crossed, left, back = _measured(model, x, (pair[0], unpack))
    for name, right in wanted.items():
        if not same(found[name], right):
            return f"the gradient of {name} is not that without hooks"
    if left > kept / 10:
        return f"{left / kept:.0%} of the activations are on the device still"
    if crossed > least:
        return f"{crossed:,} bytes travel to the host, and the activations are {least:,}"
    if any(at_hand):
        return "backward gets tensors that are in the host's memory: copy them to the device"
    if back < crossed:
        return f"{crossed:,} bytes travel to the host, and {back:,} back to the device"
    return ""


def _counting(model: nn.Module) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Hooks that leave all as it is, and count what is no parameter."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            pack.nbytes += tensor.nbytes  # type: ignore[attr-defined]
        return tensor.detach()

    pack.nbytes = 0  # type: ignore[attr-defined]
    return pack, lambda tensor: tensor


def _measured(
    model: nn.Module, x: torch.Tensor, hooks: Any
) -> tuple[dict[str, Any], int, int, int]:
    """Gradients; bytes to the host (or, where hooks count, that would travel); activations on the
    device when backward begins; bytes back."""
    model.zero_grad()
    inputs = x.clone().requires_grad_()
    with Budget(10**9, model) as device, Crossings() as crossed:
        with saved_tensors_hooks(*hooks):
            y = model(inputs)
        y.backward(torch.ones_like(y))
    start = next(phase.start for phase in device.phases if phase.name == "backward")
    left = sum(n[start] for name, n in device.history.items() if name != "parameters")
    results: dict[str, Any] = {"x": inputs.grad}
    results |= {name: parameter.grad for name, parameter in model.named_parameters()}
    to_host = getattr(hooks[0], "nbytes", crossed.to_host)
    return results, to_host, left - 2 * y.nbytes, crossed.to_device
