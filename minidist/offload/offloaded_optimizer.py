"""ZeRO-Offload (lesson: offload): any optimizer, its states and its step on the host."""

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from minidist.common.optimizer_states import require_states_of
from minidist.offload.budget import on_host, put_on_host
from minidist.offload.mirror import CopyStream, Mirror
from minidist.zero.sharded_optimizer import is_elementwise


class OffloadedOptimizer(Optimizer):
    """An optimizer that lives on the host, for parameters on a device. ZeRO-Offload.

        optimizer = md.OffloadedOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)

    A step fetches the gradients in `.grad`, updates the host's copies of the parameters, and sends
    these back: on a GPU beside what it computes, by a stream and pinned memory. Parameters of 16
    bits have a copy and states in float32. Use it as any optimizer: with schedulers, with
    `DistributedDataParallel`, `fully_shard` or `Pipeline`. With ZeRO, stage 1 or 2, a host has its
    ranks' shards:

        adam = md.OffloadedOptimizer.of(torch.optim.Adam)
        optimizer = md.ZeroRedundancyOptimizer(model.parameters(), adam, lr=1e-3)

    params: as for any optimizer: parameters, pairs of name and parameter, or groups.
    optimizer_class: the optimizer that takes the step, elementwise or not (but LBFGS raises: its
        step calls a closure again and again); defaults: its options.

    `state` and `state_dict()` are those of the bare optimizer, on the CPU, and load in it. Each
    step begins with the parameters, so a change of them between two steps is seen. (The bits of a
    float32 copy that 16 bits cannot hold are in no checkpoint.) `shards` are the copies; their
    `.grad` is what `receive_in_backward` has fetched.

    Raises TypeError for an optimizer_class that is none; `OutOfMemory` if the host has no room:
    here for copies and gradients, or in the first step for the states. Parameters and states then
    stay as they were. Lesson: offload.
    """

    def __init__(self, params: Any, optimizer_class: type[Optimizer], **defaults: Any) -> None:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
            raise TypeError(f"optimizer_class must be an optimizer, not {optimizer_class!r}")
        self._mirrors: dict[nn.Parameter, Mirror] = {}
        self._inner: Any = None  # it trains the masters
        super().__init__(params, defaults)
        self._inner = optimizer_class(self._mirrored(), **defaults)
        self.defaults = self._inner.defaults
        self._take_options()  # with all that were not given

    @staticmethod
    def of(optimizer_class: type[Optimizer]) -> type["OffloadedOptimizer"]:
        """The class of such optimizers, for what wants a class: `ZeroRedundancyOptimizer`."""

        class Offloaded(OffloadedOptimizer):
            elementwise = is_elementwise(optimizer_class)

            def __init__(self, params: Any, **defaults: Any) -> None:
                super().__init__(params, optimizer_class, **defaults)

        Offloaded.__name__ = Offloaded.__qualname__ = f"Offloaded{optimizer_class.__name__}"
        return Offloaded

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As for any optimizer."""
        super().add_param_group(param_group)
        try:
            for parameter in self.param_groups[-1]["params"]:
                self._mirrors[parameter] = Mirror(parameter)
            if self._inner is not None:
                self._inner.add_param_group(self._mirrored()[-1])
                self._take_options()
        except Exception:
            for parameter in self.param_groups.pop()["params"]:
                self._mirrors.pop(parameter, None)
            raise

    @property
    def shards(self) -> list[nn.Parameter]:
        """The host's copies of the parameters, as parameters."""
        self._wait()
        return [mirror.master for mirror in self._mirrors.values()]

    # ---- gradients -------------------------------------------------------------------------

    def receive_in_backward(self) -> None:
        """From now on each gradient leaves the device as soon as backward has made it, and `.grad`
        stays None: the device never holds all of them. Gradients of several backward passes add up
        on the host until the next step, in float32 if they have 16 bits. `model.zero_grad()` does
        not reach them there: call `zero_grad()` of this optimizer, and to clip them, clip the
        `.grad` of `shards`.

        This is for one process, or a stage of a pipeline. An average over ranks is complete only
        after backward; `step` fetches that. Raises RuntimeError if a hook waits for a parameter's
        gradient, as a wrapper's that averages. If that is made later, backward raises it; torch's,
        `step`.
        """
        if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in self._mirrors):
            raise RuntimeError(
                "the gradients of these parameters are awaited already: by a wrapper that averages "
                "them over the ranks, which is complete only after backward, by another optimizer "
                "or another hook. Let step() fetch"
            )
        me = weakref.ref(self)

        def leave(parameter: Any) -> None:
            if (optimizer := me()) is not None:
                optimizer._mirrors[parameter].receive(parameter.grad)
                parameter.grad = None

        trained = [p for p in self._mirrors if p.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(leave) for p in trained]
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the parameters, and of what the host has received."""
        super().zero_grad(set_to_none)
        for mirror in self._mirrors.values():
            mirror.forget_gradient()

    def _wait(self) -> None:
        """Wait for the gradients, and give them to the masters."""
        for stream in self._streams():
            stream.host_waits()
        for mirror in self._mirrors.values():
            mirror.show_gradient()

    def _streams(self) -> set[CopyStream]:
        return {mirror.stream for mirror in self._mirrors.values()}

    # ---- a step ----------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Fetch gradients, update on the host, and begin to send the parameters back: what the
        device computes next waits for them."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for mirror in self._mirrors.values():
            mirror.require_unchanged()
        with torch.no_grad():
            for parameter, mirror in self._mirrors.items():
                if parameter.grad is not None:
                    mirror.receive(parameter.grad)
            changed = [mirror for mirror in self._mirrors.values() if mirror.gradients]
            for mirror in changed:
                mirror.read()
            self._wait()
            try:
                self._update()
            finally:
                for mirror in changed:
                    mirror.forget_gradient()
            for mirror in changed:
                mirror.write()
            for stream in self._streams():
                stream.device_waits()
        return loss

    def _update(self) -> None:
        """The step itself. If it fails, the states stay as they were."""
        self._give_options()
        self._inner.state.clear()
        for parameter, states in cast(dict[nn.Parameter, Any], self.state).items():
            master = self._mirrors[parameter].master
            for name, value in states.items():  # as a wrapper has loaded them: as the parameter is
                if name != "step" and isinstance(value, torch.Tensor):
                    states[name] = value.to("cpu", master.dtype if value.ndim else value.dtype)
            self._inner.state[master] = states
        try:
            with on_host():
                self._inner.step()
        except Exception:
            for mirror in self._mirrors.values():
                mirror.forget()
            raise
        finally:
            put_on_host(dict(self._inner.state))
        self._take_state()
        self._take_options()

    # ---- what both optimizers know ----------------------------------------------------------

    def _mirrored(self) -> list[dict[str, Any]]:
        """The groups, of the host's copies."""
        return [
            {**group, "params": [self._mirrors[p].master for p in group["params"]]}
            for group in self.param_groups
        ]

    def _give_options(self) -> None:
        self._inner.param_groups[:] = self._mirrored()

    def _take_options(self) -> None:
        for mine, its in zip(self.param_groups, self._inner.param_groups, strict=True):
            mine.update({name: value for name, value in its.items() if name != "params"})

    def _take_state(self) -> None:
        self.state.clear()
        for parameter, mirror in self._mirrors.items():
            if mirror.master in self._inner.state:
                self.state[parameter] = self._inner.state[mirror.master]

    # ---- checkpoints -----------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a `state_dict` of this or of the bare optimizer. Raises ValueError, and changes
        nothing, if it is of other groups or another model."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        require_states_of(parameters, state_dict["state"], factored=True)
        self._give_options()
        with on_host():
            self._inner.load_state_dict(state_dict)
        put_on_host(dict(self._inner.state))
        self._take_state()
        self._take_options()
        for mirror in self._mirrors.values():
            mirror.forget()

    def __getstate__(self) -> Any:
        raise TypeError(
            f"an {type(self).__name__} cannot be copied or saved: it awaits the gradients of its "
            "own parameters. Save its state_dict(), or make another one for a copy of the model"
        )
