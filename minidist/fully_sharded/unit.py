"""A unit: what is gathered, computed with and freed together (lesson 9)."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from minidist.fully_sharded.flat import FlatParameter


class Unit:
    """The flat parameters of one wrapper: one for each dtype, trained and frozen ones apart."""

    def __init__(self, flats: list[FlatParameter], reshard_after_forward: bool) -> None:
        self.flats = flats
        self.reshard_after_forward = reshard_after_forward
        self.before: Any = None  # what came before it in the last forward pass

    def start(self) -> None:
        """Begin to gather its parameters."""
        for flat in self.flats:
            flat.start()

    def unshard(self, arrived: Callable[[FlatParameter, Any], None]) -> None:
        """Have the parameters there, where the modules look for them. A backward pass that has the
        gradients of all parameters of a flat one calls `arrived`, with them."""
        self.start()
        for flat in self.flats:
            flat.wait()
            show(flat, arrived)

    def free(self) -> None:
        """Give back the memory of its parameters; each module has its pieces again."""
        for flat in self.flats:
            if not flat.open:
                hide(flat)


def show(flat: FlatParameter, arrived: Callable[[FlatParameter, Any], None]) -> None:
    """In the instance's own dictionary, where Python looks before it asks nn.Module."""
    pieces = [slot.piece.own for slot in flat.slots]
    if not flat.trained:
        if any(piece.requires_grad for piece in pieces):
            raise RuntimeError(
                f"parameter {flat.slots[0].names[0]} or another one of its unit was frozen when "
                "it was wrapped. Unfreeze first, and wrap then"
            )
        views: Any = flat.views()
    elif torch.is_grad_enabled():
        views = _Whole.apply(flat, arrived, *pieces)
    else:
        views = flat.views()
    for slot, view in zip(flat.slots, views, strict=True):
        for module, name in slot.places:
            module.__dict__[name] = view
            if hasattr(module, "_flat_weights_names"):  # nn.LSTM and the like have a list as well
                module._flat_weights = [getattr(module, n) for n in module._flat_weights_names]  # type: ignore[assignment, union-attr]


def hide(flat: FlatParameter) -> None:
    """The opposite of `show`. Frees the whole."""
    if flat.there:
        for slot in flat.slots:
            for module, name in slot.places:
                module.__dict__.pop(name, None)
                if "_flat_weights" in module.__dict__:
                    module._flat_weights = []  # type: ignore[assignment]
        flat.free()


class _Whole(torch.autograd.Function):
    """From the pieces of all ranks to whole parameters: forward, an all_gather, which is done
    already; backward, a reduce_scatter, which is begun. Its result is awaited only at the end of
    the pass, so no gradient is given back to autograd here."""

    @staticmethod
    def forward(
        ctx: Any,
        flat: FlatParameter,
        arrived: Callable[[FlatParameter, Any], None],
        *pieces: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.flat, ctx.arrived = flat, arrived
        ctx.version = flat.shard._version
        ctx.set_materialize_grads(False)
        return tuple(flat.views())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        if ctx.flat.shard._version != ctx.version:
            raise RuntimeError(
                "parameters have changed since the forward pass to which this backward pass "
                "belongs: backward first, then the optimizer's step"
            )
        ctx.arrived(ctx.flat, gradients)
        return (None,) * (2 + len(gradients))
