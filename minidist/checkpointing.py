"""Lesson: activation_checkpointing. Activations that are computed twice instead of kept.

Autograd keeps what backward will need of every op: for a block of a transformer, its input and 15
times as much. `checkpoint_wrapper` keeps the input alone. Backward, when it comes to the block,
computes its forward pass again, and has the rest for as long as it is in that block:

    kept until backward:    the inputs of the wrapped modules
    most at once:           these, and all activations of one wrapped module
    computed:               forward twice, backward once: a third more

So n equal layers that each keep a times their input are best wrapped in segments of √(n/a): then
2√(na) inputs' worth is in memory at once, not na.
Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174), for a = 1.

`NaiveCheckpoint` is the idea. `checkpoint_wrapper` takes modules with any inputs and outputs, draws
the same random numbers again, and sees what was changed in between. It is written with the hooks
that autograd offers for what it saves, after torch.utils.checkpoint (use_reentrant=False): the
first pass builds its graph as ever, but with a place holder for each tensor; the first place holder
that backward asks for fills them all. So autograd itself runs only once: gradients arrive once, in
the order and with the hooks of the bare module, for which the strategies wait.
"""

import weakref
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from minidist.common.replay import Replay
from minidist.common.wrapper import Wrapper


class NaiveCheckpoint(torch.autograd.Function):
    """Keep x, and compute the rest again. Lesson: activation_checkpointing.

    y = NaiveCheckpoint.apply(x, module)    # instead of module(x); x needs a gradient
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        output: torch.Tensor = module(x)  # here autograd is off, and keeps nothing
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.module(x)  # this time autograd keeps what it needs, until the next line
        output.backward(grad)
        return x.grad, None


class CheckpointWrapper(Wrapper):
    """What `checkpoint_wrapper` returns. Lesson: activation_checkpointing."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        run = _Pass(self.module, inputs, kwargs)
        with saved_tensors_hooks(run.leave_out, run.fetch):
            outputs = self.module(*inputs, **kwargs)
        run.end()
        return outputs


def checkpoint_wrapper(module: nn.Module) -> CheckpointWrapper:
    """The same module, of which only the inputs are kept for backward.
    Lesson: activation_checkpointing.

        model.blocks = nn.Sequential(*map(md.checkpoint_wrapper, model.blocks))

    Outputs and gradients are those of `module`, to the bit. The second pass has the first one's
    random numbers (of the CPU and of the inputs' devices) and autocast, and leaves random numbers
    and buffers as they were. For that each forward pass also keeps the generators' states: 5 kB of
    the CPU's.

    Inputs and outputs are tensors, nested in tuples, lists and dicts, and anything else. Wrapped
    modules may contain others, share weights, be used several times, and be parts of any strategy
    of the course, or contain one. With `retain_graph` or `create_graph`, each backward pass
    computes forward again. Without gradients (`torch.no_grad`) it is the module.

    The module must do the same each time. RuntimeError in forward, if it overwrites its inputs; in
    backward, if inputs or weights have been changed in place since, or if the second pass saves
    other tensors than the first, by number, shape, dtype or device.

    Limits: not seen is what changes values only: random numbers from a generator of one's own, a
    buffer that forward both reads and moves, as spectral norm does, or weights that were replaced,
    as after `torch.func.functional_call`: checkpoint what calls it.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"checkpoint_wrapper needs an nn.Module, not {type(module).__name__}")
    return CheckpointWrapper(module)


class _PlaceHolder:
    """Stands in the graph for a tensor that was not saved. `tensor` is there from the second pass
    until backward fetches it."""

    tensor: torch.Tensor | None = None


class _Pass:
    """One forward pass of `module`, and all that is needed to do it again. It lives as long as a
    place holder of it is in the graph."""

    def __init__(self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._module, self._ended = module, False
        self._leaves, self._structure = tree_flatten((inputs, kwargs))
        self._tensors = {i: x for i, x in enumerate(self._leaves) if isinstance(x, torch.Tensor)}
        self._wanted = {i: x.requires_grad for i, x in self._tensors.items()}
        self._versions = [x._version for x in self._tensors.values()]
        self._weights = [(p, p._version) for p in module.parameters()]
        self._replay = Replay(module, list(self._tensors.values()))
        self._holders: list[weakref.ref[_PlaceHolder]] = []  # in the order in which they were made
        self._kinds: list[str] = []  # of the tensors for which they stand
        # Saved by autograd, so that it sees changes, and that a wrapper around us keeps less.
        self._kept: Any = _Keep.apply(
            torch.empty(0, requires_grad=True), *[x.detach() for x in self._tensors.values()]
        )
        for i in self._tensors:
            self._leaves[i] = None

    # ---- the first pass --------------------------------------------------------------------

    def leave_out(self, tensor: torch.Tensor) -> _PlaceHolder:
        """What autograd saves instead of a tensor."""
        holder = _PlaceHolder()
        self._holders.append(weakref.ref(holder))
        self._kinds.append(_kind(tensor))
        return holder

    def end(self) -> None:
        """Raises RuntimeError if the pass has overwritten its inputs."""
        if self._versions != [x._version for x in self._tensors.values()]:
            raise RuntimeError(
                f"{type(self._module).__name__} changes its input in place, and cannot be computed "
                "again from what is left: wrap a module that begins with another layer, or clone"
            )
        self._tensors, self._ended = {}, True

    # ---- within backward -------------------------------------------------------------------

    def fetch(self, holder: _PlaceHolder) -> torch.Tensor:
        """The tensor that was not saved. Only autograd has it from now on."""
        if holder.tensor is None:
            self._compute_again()
        tensor, holder.tensor = holder.tensor, None
        assert tensor is not None
        return tensor

    def _compute_again(self) -> None:
        """Forward once more, on inputs cut off from the graph, to fill the place holders that are
        still waited for."""
        if any(weight._version != version for weight, version in self._weights):
            raise RuntimeError(
                f"the weights of a checkpointed {type(self._module).__name__} were changed in "
                "place between forward and backward: its activations cannot be computed again"
            )
        kinds: list[str] = []

        def save(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.detach()  # or its node would hold it, and it its node
            holder = self._holders[len(kinds)]() if len(kinds) < len(self._holders) else None
            if holder:
                holder.tensor = tensor
            kinds.append(_kind(tensor))
            return tensor

        inputs, kwargs = self._inputs()
        with (
            self._replay.same_again(),
            torch.enable_grad(),
            saved_tensors_hooks(save, lambda tensor: tensor),
        ):
            self._module(*inputs, **kwargs)
        # A module that calls autograd itself comes here before its first pass has ended.
        if kinds[: len(self._kinds)] != self._kinds or (self._ended and kinds != self._kinds):
            self._complain(kinds)

    def _inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            kept = self._kept.grad_fn.saved_tensors
        except RuntimeError as error:
            error.add_note(
                "These were to be the inputs of a checkpointed "
                f"{type(self._module).__name__}, to compute it again."
            )
            raise
        leaves = list(self._leaves)
        for (i, wanted), x in zip(self._wanted.items(), kept, strict=True):
            leaves[i] = x.detach().requires_grad_(wanted)
        return tree_unflatten(leaves, self._structure)

    def _complain(self, kinds: list[str]) -> None:
        for holder in self._holders:
            if (left := holder()) is not None:
                left.tensor = None
        pairs = zip(self._kinds, kinds, strict=False)
        differ = [f"{was} was {now} the second time" for was, now in pairs if was != now]
        counts = f"{len(self._kinds)} tensors were {len(kinds)} the second time"
        raise RuntimeError(
            f"a checkpointed {type(self._module).__name__} must do the same each time, and of what "
            f"it saves for backward, {(differ or [counts])[0]}"
        )


class _Keep(torch.autograd.Function):
    """Saves tensors: in its own node, which is on the way of no gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise AssertionError("_Keep has no backward")


def _kind(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"a tensor {tuple(tensor.shape)} {dtype} on {tensor.device}"
