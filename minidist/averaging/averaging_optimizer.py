"""The wrapper around any optimizer: its step is the rank's own, and what follows is not
(lesson: beyond_gradients)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from minidist.common.agree import require_same
from minidist.common.groups import require_group
from minidist.common.replicas import broadcast_state, require_same_lines, words


def is_count(value: Any) -> bool:
    """Whether it is a whole number, as a count of steps is."""
    return isinstance(value, int) and not isinstance(value, bool)


class AveragingOptimizer(Optimizer):
    """What `LocalSGD`, `DiLoCo`, `StreamingDiLoCo` and `Gossip` have in common.

    optimizer: any optimizer of torch's interface, of this rank's model. It takes the steps, with
        the rank's own gradients, so the model is not wrapped in DistributedDataParallel. LBFGS
        raises: its step calls a closure again and again.
    period: steps from one meeting of the ranks to the next.
    process_group: the ranks that take part; None is the default group.

    At construction every rank takes rank 0's parameters. (An optimizer does not know buffers: those
    of batch norm stay each rank's own.) All ranks must take the same number of steps.
    `param_groups` and `state` are those of `optimizer`, so learning-rate schedulers take either.
    `steps` counts.

    `state_dict()` is that of `optimizer`, and an entry "averaging". It loads in the bare optimizer
    as well, and that of the bare one loads here; the count then begins anew. Replicas differ
    between two meetings, so each rank saves its own model and optimizer. With `md.saving` that is
    `save(step, model=model, replica=model, averaging=optimizer)`; it loads on as many ranks.

    Raises RuntimeError without a process group; ValueError, on every rank, if the ranks have
    different models or arguments; TypeError for what is no optimizer. `step` raises
    RuntimeError if a parameter was unfrozen or added since: it would be another one on each rank
    for good.
    Lesson: beyond_gradients.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        period: int,
        process_group: dist.ProcessGroup | None = None,
        **arguments: Any,
    ) -> None:
        name = type(self).__name__
        self.process_group = require_group(process_group, name)
        found = {"the kind of averaging": name, "the optimizer": type(optimizer).__name__}
        # What is wrong from here on is wrong on every rank, so every rank raises.
        require_same(self.process_group, {**found, "period": period, **arguments})
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"{name} wraps an optimizer, not {type(optimizer).__name__}")
        if not is_count(period) or period < 1:
            raise ValueError(f"{name}: period must be 1 step or more, not {period!r}")
        self.optimizer, self.period, self.steps = optimizer, period, 0
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        self.parameters: list[nn.Parameter] = [p for p in everything if p.requires_grad]
        self._frozen = [p for p in everything if not p.requires_grad]
        lines = [words("parameter", str(i), p) for i, p in enumerate(everything)]
        require_same_lines(lines, self.process_group)
        if not self.parameters:
            raise ValueError(f"{name}: the optimizer has no parameter to train")
        broadcast_state(everything, self.process_group)
        super().__setstate__({})  # as torch's constructor, but without groups of its own

    # Asked for each time: when `optimizer` loads a state, it makes new groups.

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """Those of `optimizer`."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of `optimizer`."""
        return self.optimizer.state

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """Those of `optimizer`."""
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only of the bare optimizer. Raises RuntimeError."""
        raise RuntimeError(
            f"{type(self).__name__}: add a group to the bare optimizer first, and wrap it then"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """That of `optimizer`, which may hold gradients elsewhere, too."""
        self.optimizer.zero_grad(set_to_none)

    # ---- a step ----------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of this rank; and after the last one of a period, the meeting. Returns what
        `closure` does, which is called once, before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(p.requires_grad for p in self._frozen):
            raise RuntimeError(
                f"{type(self).__name__}: a parameter was frozen when its optimizer was wrapped, "
                "and is not now. Unfreeze it first, and wrap the optimizer then"
            )
        then = len(self.parameters) + len(self._frozen)
        now = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if now != then:
            raise RuntimeError(
                f"{type(self).__name__}: the optimizer had {then} parameters when it was wrapped, "
                f"and has {now} now. Add a group first, and wrap the optimizer then"
            )
        self.before_step()
        self.optimizer.step()
        self.steps += 1
        with torch.no_grad():
            self.after_step()
        return loss

    def before_step(self) -> None:
        """What ranks do before their own step: nothing."""

    def after_step(self) -> None:
        """What they do after it, with `steps` steps taken."""
        raise NotImplementedError

    # ---- checkpoints -----------------------------------------------------------------------

    def __getstate__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or saved: it meets other ranks. Save its "
            "state_dict(), or copy the model and wrap an optimizer of the copy"
        )

    def own_state(self) -> dict[str, Any]:
        """What the next meeting needs beside the parameters: nothing."""
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Take it; or, if it is empty, begin with the parameters as they are."""

    def state_dict(self) -> dict[str, Any]:
        """That of the bare optimizer, and "averaging": the steps, and what the kind needs."""
        return {
            **self.optimizer.state_dict(),
            "averaging": {"steps": self.steps, **self.own_state()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take one of these, or of the bare optimizer. Load the model's first. All ranks call it,
        with states of one kind: where that of DiLoCo has no anchors, they are the mean of the
        ranks' parameters. Raises ValueError if it is of other groups."""
        own = dict(state_dict.get("averaging", {"steps": 0}))
        bare = {key: value for key, value in state_dict.items() if key != "averaging"}
        self.optimizer.load_state_dict(bare)
        self.steps = own.pop("steps")
        self.load_own_state(own)
