"""The puzzles and the exercise of the lesson feature_splitting."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from minidist.course.checks.verdict import (
    NotYet,
    check,
    function,
    ranks,
    require_right,
    same,
    shown,
)
from minidist.course.zoo import Block
from minidist.instruments.measure import TrafficCounter, count_flops

ROWS, LENGTH, HEAD = 2, 12, 4  # a batch (ROWS, LENGTH, heads × HEAD)
Gradients = dict[str, Any]
IN_BETWEEN = {  # what each of the functions needs
    "a": "a layer norm needs a mean over all H features, and a rank has a part of them",
    "b": "",
    "c": "a softmax needs a sum over all H features, and a rank has a part of them",
    "d": "",
}
OPERATORS = {  # of the weight of a norm within a head
    "Copy": "",
    "Sum": "forward, it would add up the weights of all ranks",
    "nothing": "then each rank has the gradient of its own heads only",
}
OPERATORS |= {"copy_to_group": "", "reduce_from_group": OPERATORS["Sum"]}  # as minidist has them


@check
def between(answer: object) -> None:
    """What may stand between a layer cut by columns and one cut by rows."""
    letters = set(answer.lower()) - set(" ,;") if isinstance(answer, str) else set()
    if not letters or letters - IN_BETWEEN.keys():
        raise NotYet(f"give the letters of those that can, such as ac: {shown(answer)}.")
    for letter in sorted(letters):
        if IN_BETWEEN[letter]:
            raise NotYet(f"not {letter}: {IN_BETWEEN[letter]}.")
    if letters != {"b", "d"}:
        raise NotYet("that one can, and so can another one.")


@check
def operator(answer: object) -> None:
    """The operator that a replicated weight needs if each rank uses it for its own heads."""
    named = getattr(answer, "__self__", answer)  # of Copy.apply, Copy
    name = answer if isinstance(answer, str) else getattr(named, "__name__", None)
    if isinstance(name, str):  # also "Copy.apply", "tensor_parallel.copy_to_group()"
        name = name.strip(" `()").removesuffix(".apply").rpartition(".")[2]
    if not isinstance(name, str) or name not in OPERATORS:
        raise NotYet(f"give Copy, Sum or nothing: {shown(answer)}.")
    if OPERATORS[name]:
        raise NotYet(f"it is not {name}: {OPERATORS[name]}.")


@check
def attention(answer: object) -> None:
    """Attention of a `zoo.Block`, of which each rank computes its heads."""
    for world_size, heads in (2, 4), (3, 3), (4, 8):
        where = f", with {heads} heads"
        results = require_right(
            _trial, function(answer), heads, world_size=world_size, where=where, of_rank=": "
        )
        _, found, wanted = zip(*results, strict=True)
        if wrong := _of_weights(found, wanted[0]):
            raise NotYet(f"on {ranks(world_size)}{where}: {wrong}.")


def _of_weights(found: tuple[Gradients, ...], wanted: Gradients) -> str:
    """What is wrong with the gradients that the ranks have found together, if anything."""
    for name, right in wanted.items():
        own = [each[name] for each in found]
        for rank, gradient in enumerate(own):
            if gradient is None:
                return f"{name} has no gradient on rank {rank}"
            if name == "out.bias" and not same(gradient, right):  # every rank has it
                return f"rank {rank} finds another gradient of {name} than one process"
            rows = int((gradient != 0).flatten(1).any(1).sum()) if name == "qkv.weight" else 0
            if rows > len(right) // len(found):
                return f"rank {rank} uses {rows} of the {len(right)} rows of {name}"
        if name != "out.bias" and not same(sum(own), right):
            return f"{name} has another gradient than in one process"
    return ""


def _trial(attempt: Callable[..., Any], heads: int) -> tuple[str, Gradients, Gradients]:
    """What is wrong on this rank, if anything; the gradients here, and those of one process."""
    torch.manual_seed(0)
    size, width = dist.get_world_size(), heads * HEAD
    block = Block(width, heads).double()
    x = torch.randn(ROWS, LENGTH, width, dtype=torch.float64).requires_grad_()
    parameters = {n: block.get_parameter(n) for n in ("qkv.weight", "out.weight", "out.bias")}
    outputs: list[torch.Tensor] = []

    def step(forward: Callable[..., Any]) -> None:
        y = forward(block, x)
        outputs.append(y)
        if torch.is_tensor(y) and y.shape == x.shape and y.requires_grad:
            y.backward(torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape))

    def gradients() -> Gradients:
        found = {name: p.grad for name, p in parameters.items()} | {"x": x.grad}
        block.zero_grad()
        x.grad = None
        return found

    whole = count_flops(step, _whole)
    wanted = gradients()
    with TrafficCounter() as traffic:
        flops = count_flops(step, attempt)
    found = gradients()
    right_x, of_x = wanted.pop("x"), found.pop("x")
    right, y = outputs
    wrong = ""
    if not torch.is_tensor(y) or y.shape != right.shape:
        wrong = f"my_attention returns {_said(y)}, not a tensor of shape {tuple(right.shape)}"
    elif not same(y, right):
        wrong = "the output is not that of one process"
    elif not y.requires_grad:
        wrong = "the output has no gradient: autograd cannot see what made it"
    elif flops > 1.02 * whole / size:
        share = f"{flops / whole:.0%} of the arithmetic of one process"
        wrong = f"it does {share}, in place of {1 / size:.0%}: a rank has its own heads only"
    elif not same(of_x, right_x):
        wrong = "the gradient of x is not that of one process"
    elif _sent(traffic, size) > 1.3 * (limit := 4 * (size - 1) / size * x.nbytes):
        wrong = f"it sends {_sent(traffic, size):,.0f} bytes, two all_reduces send {limit:,.0f}"
    return wrong, found, wanted


def _whole(block: Block, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (
        each.unflatten(-1, (block.heads, -1)).transpose(1, 2) for each in block.qkv(x).chunk(3, -1)
    )
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    y: torch.Tensor = block.out(attended.transpose(1, 2).flatten(2))
    return y


def _said(y: object) -> str:
    return f"a tensor of shape {tuple(y.shape)}" if isinstance(y, torch.Tensor) else shown(y)


def _sent(traffic: TrafficCounter, size: int) -> float:
    """The bytes that a rank sends: those counted, and those of whole collectives as rings."""
    rounds = {"all_reduce": 2}
    calls = sum(rounds.get(name, 1) * nbytes for name, (_, nbytes) in traffic.calls.items())
    return traffic.sent_bytes + (size - 1) / size * calls
