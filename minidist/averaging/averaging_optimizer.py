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


class AveragingOptimizer(Optimizer):
    """What `LocalSGD` and `DiLoCo` have in common.

    optimizer: any optimizer of torch's interface, of this rank's model. It takes the steps, with
        the rank's own gradients, so the model is not wrapped in DistributedDataParallel.
    period: steps from one meeting of the ranks to the next.
    process_group: the ranks that take part; None is the default group.

    At construction every rank takes rank 0's parameters. All ranks must take the same number of
    steps. `param_groups` and `state` are those of `optimizer`, so learning-rate schedulers take
    either. `steps` is how many were taken.

    `state_dict()` is that of `optimizer`, and an entry "averaging". It loads in the bare optimizer
    as well, and that of the bare one loads here; the count then begins anew. Replicas differ
    between two meetings, so each rank saves its own model and optimizer. With `md.saving` that is
    `save(step, model=model, replica=model, averaging=optimizer)`; it loads on as many ranks.

    Raises RuntimeError without a process group; ValueError, on every rank, if the ranks have
    different models or arguments. `step` raises RuntimeError if it trains a parameter that was
    frozen or not there when the optimizer was wrapped.

    Limits: buffers, such as those of batch norm, stay each rank's own: an optimizer does not know
    them. `step` calls its closure once, so LBFGS does not work. It cannot be copied: copy the
    model, and wrap an optimizer of the copy.
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
        if not isinstance(period, int) or period < 1:
            raise ValueError(f"{name}: period must be 1 step or more, not {period!r}")
        self.optimizer, self.period, self.steps = optimizer, period, 0
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        lines = [words("parameter", str(i), p) for i, p in enumerate(everything)]
        require_same_lines(lines, self.process_group)
        broadcast_state(everything, self.process_group)
        self.parameters = self._trained()
        super().__setstate__({})  # as torch's constructor, but without groups of its own

    def _trained(self) -> list[nn.Parameter]:
        groups = self.optimizer.param_groups
        return [p for group in groups for p in group["params"] if p.requires_grad]

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

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of this rank; and after the last one of a period, the meeting. Returns what
        `closure` does, which is called once, before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not set(self._trained()) <= set(self.parameters):
            raise RuntimeError(
                f"{type(self).__name__}: a parameter was unfrozen or added since its optimizer was "
                "wrapped. Change the optimizer first, and wrap it then"
            )
        with torch.no_grad():
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

    def own_state(self) -> dict[str, Any]:
        """What the next meeting needs beside the parameters: nothing."""
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Take it; or, if it is empty, begin with the parameters as they are."""

    def state_dict(self) -> dict[str, Any]:
        """That of the bare optimizer, and "averaging": the steps, and what the kind needs."""
        own = {"steps": self.steps, **self.own_state()}
        return {**self.optimizer.state_dict(), "averaging": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take one of these, or of the bare optimizer. Load the model's first. All ranks load
        states of one kind."""
        bare = {key: value for key, value in state_dict.items() if key != "averaging"}
        self.optimizer.load_state_dict(bare)
        own = dict(state_dict.get("averaging", {"steps": 0}))
        self.steps = own.pop("steps")
        self.load_own_state(own)
