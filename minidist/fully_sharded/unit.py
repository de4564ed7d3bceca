"""A unit: what is gathered, computed with and freed together. Lesson: fully_sharded"""

from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves

from minidist.fully_sharded.flat import FlatParameter

DEPTH = 4  # of objects within objects, in which tensors are looked for
_OF_TORCH = frozenset(nn.Module().__dict__)  # attributes that every module has


class Unit:
    """The flat parameters of one wrapper: one for each dtype, trained and frozen ones apart."""

    def __init__(
        self, flats: list[FlatParameter], modules: Sequence[nn.Module], reshard_after_forward: bool
    ) -> None:
        self.flats, self.modules = flats, modules
        self.reshard_after_forward = reshard_after_forward
        self.before: Any = None  # what came before it in the last forward pass
        self.lent = False  # its modules have full parameters, by `summon_full_params`
        # What a state_dict has of a flat parameter's parameters; None: whole tensors.
        self.form: Callable[[FlatParameter], Iterator[torch.Tensor]] | None = None

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

    def free(self, keep: bool = False) -> None:
        """Give back the memory of its parameters, or `keep` it; each module has its pieces."""
        for flat in self.flats:
            if not flat.open:
                hide(flat, keep)

    def made(self, since: int, output: list[torch.Tensor]) -> list[torch.Tensor]:
        """What a forward pass that began at autograd's node `since` has put into its graph: of the
        output, and of the attributes of its modules."""
        kept = [
            value
            for module in self.modules
            for name, value in module.__dict__.items()
            if name not in _OF_TORCH and name not in module._parameters and name != "_flat_weights"
        ]
        found = [*output, *tensors_in(kept, depth=0)]
        return [t for t in found if t.grad_fn is not None and t.grad_fn._sequence_nr() >= since]

    def lends(self, output: list[torch.Tensor]) -> bool:
        """Whether the output is, in part, a view of the parameters."""
        ours = [flat.whole.untyped_storage().data_ptr() for flat in self.flats if flat.there]
        strided = (tensor for tensor in output if tensor.layout is torch.strided)
        return any(tensor.untyped_storage().data_ptr() in ours for tensor in strided)


def tensors_in(value: Any, depth: int = DEPTH) -> Iterator[torch.Tensor]:
    """All tensors in it, nested in lists, dicts and objects."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, set | frozenset):
            yield from tensors_in(list(leaf), depth)
        elif depth and not isinstance(leaf, _NO_CONTAINERS):
            slots = getattr(type(leaf), "__slots__", ())
            names = {
                *getattr(leaf, "__dict__", ()),
                *([slots] if isinstance(slots, str) else slots),
            }
            if names:
                yield from tensors_in([getattr(leaf, name, None) for name in names], depth - 1)


_NO_CONTAINERS = (
    *(int, float, complex, str, bytes, type(None), type, nn.Module),
    *(FunctionType, MethodType, ModuleType, torch.dtype, torch.device, torch.Size),
)


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
        views = _FullParameters.apply(flat, arrived, *pieces)
    else:
        views = flat.views()
    for slot, view in zip(flat.slots, views, strict=True):
        for module, name in slot.places:
            module.__dict__[name] = view
            enlist(module)


def enlist(module: nn.Module) -> None:
    """nn.LSTM and the like have their parameters in a list as well."""
    if hasattr(module, "_flat_weights_names"):
        names: Any = module._flat_weights_names
        module._flat_weights = [getattr(module, name) for name in names]  # type: ignore[assignment]


def hide(flat: FlatParameter, keep: bool = False) -> None:
    """The opposite of `show`. Frees the whole, unless it is to `keep` its memory."""
    if flat.there:
        for slot in flat.slots:
            for module, name in slot.places:
                module.__dict__.pop(name, None)
                if "_flat_weights" in module.__dict__:
                    module._flat_weights = []  # type: ignore[assignment]
    if flat.there or (flat.kept and not keep):
        flat.free(keep)


class _FullParameters(torch.autograd.Function):
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
