"""The puzzles and the exercise of the lesson offload."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from minidist.course.checks.verdict import check, function, hints, number, require_right, shown
from minidist.course.zoo import Block
from minidist.offload import Budget, Crossings


@check
@hints(
    'See "What stays, what travels", and leave out all that is with the host.',
    "Gradients leave at once, and the master copy and Adam's states are elsewhere. How many"
    " bytes of a parameter stay?",
    "Divide the GPU's memory in GB by the bytes of one weight. GB, divided by bytes, are billions.",
)
def largest(answer: object) -> str:
    """Billions of parameters on a GPU of 32 GB, with only the 16-bit weights on it."""
    number(
        answer,
        16,
        "billion",
        {
            2: "that is with all 16 bytes on the GPU",
            8: "gradients leave as soon as they are made: 2 bytes a parameter stay",
            16e9: "give billions",
            32: "a 16-bit weight takes 2 bytes",
        },
    )
    return "32 GB / 2 bytes. The paper trains 13 billion: activations need room, too."


@check
@hints(
    "Above are the times of the link and of computing.",
    "Set the two equal. Ψ is on both sides, and cancels.",
    "T is 4F, divided by 6B: F in operations a second, B in bytes a second.",
)
def tokens(answer: object) -> str:
    """Tokens a step at which computing takes as long as 4 bytes a parameter at 25 GB/s."""
    number(
        answer,
        4000,
        "tokens",
        {
            2000: "2 bytes travel down and 2 up: 4 in all",
            12000: "forward and backward take 6 operations a parameter and token, not 2",
            6000: "4 bytes travel, and a parameter and token take 6 operations",
            4e-9: "give tokens",
        },
    )
    return "4Ψ / 25 GB/s = 6Ψ × tokens / 150 TFLOP/s: the size of the model plays no part."


@check
@hints(
    "The check says that too many bytes travel. For backward autograd keeps activations, "
    "and also something that is on the device anyway.",
    "`pack` must know a weight when it sees one. Often it gets the transpose: another "
    "tensor, but in the same memory.",
    "Note where the memory of each parameter begins: `untyped_storage().data_ptr()`. What "
    "lies there stays as it is, and all else goes to the host. `unpack` must tell the two "
    "apart.",
)
def activations(answer: object) -> str:
    """Hooks that leave activations, and nothing else, with the host until backward."""
    require_right(_trial, function(answer), world_size=1, of_rank="")
    return "the gradients are the same, the activations are on the host, and no parameter travels."


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
        got = found[name]
        if got is None or got.shape != right.shape or not torch.allclose(got, right):
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
