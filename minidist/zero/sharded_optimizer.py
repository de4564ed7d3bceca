"""Stage 1 (lesson: zero): every rank holds the optimizer states of its rows of the parameters."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim import Optimizer

from minidist.common.agree import together
from minidist.common.groups import require_group
from minidist.common.replicas import require_same_lines, words
from minidist.distributed_data_parallel.buckets import BUCKET_CAP_MB, assign
from minidist.zero.shards import Cut, FlatParameters

# These look at one element at a time. Adafactor and Muon look at rows and columns, LARS and LAMB at
# norms, LBFGS at all parameters, and a subclass at whatever its step does.
ELEMENTWISE: set[type[Optimizer]] = {
    *(optim.SGD, optim.ASGD, optim.RMSprop, optim.Rprop, optim.Adagrad, optim.Adadelta),
    *(optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
}


class ZeroRedundancyOptimizer(Optimizer):
    """Any elementwise optimizer, its states shared out over the ranks. ZeRO, stage 1. Lesson: zero.

        model = md.DistributedDataParallel(model)
        optimizer = md.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)

    A step updates the rank's rows of each parameter, Ψ/N elements, and gathers the others' rows, in
    a message for each bucket; parameters of 1 MiB or more travel alone. It reads the gradients in
    `.grad`, which are the means over the ranks: whole, as `DistributedDataParallel` leaves them,
    torch's or ours; or this rank's rows, a DTensor, as `ShardedDataParallel` does.

    params: as for any optimizer: parameters, pairs of name and parameter, or groups with options
        of their own. Those that are frozen now must stay so.
    optimizer_class: a class of optimizers that look at one element at a time: torch's SGD, Adam,
        AdamW and their kin, or one that says so, by `elementwise = True` in the class itself.
    process_group: the ranks that take part; None is the default group.
    bucket_cap_mb: a bucket is full at so many MiB (the first one at 1 MiB); None is 25. Smaller
        ones hold fewer gradients at once in stage 2, and are more messages.
    defaults: the optimizer's options.

    Learning-rate schedulers act on `param_groups` as ever. `state` has the states of this rank's
    rows. In `state_dict()` they are DTensors of the whole: torch.distributed.checkpoint saves them,
    and loads them at any world size; its `get_optimizer_state_dict` with `full_state_dict=True`
    gives the bare optimizer's. `load_state_dict` takes either. After FairScale's OSS; the interface
    is that of torch's ZeroRedundancyOptimizer.

    Raises RuntimeError without a process group; TypeError for an optimizer_class that is none, or
    not elementwise, and for DTensors; ValueError, on every rank, if the ranks pass different
    parameters, or one without dimensions.

    Limits: what is moved, converted or unfrozen later is not trained, and a rank with other
    options trains its rows by them; `md.watch` finds this. The ranks must be replicas: of a
    pipeline give it the group along data. Clipping by the largest element fails on a rank that has
    no rows of a parameter, as with all DTensors.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        *,
        bucket_cap_mb: float | None = None,
        **defaults: Any,
    ) -> None:
        self.process_group = group = require_group(process_group, "ZeroRedundancyOptimizer")
        self.bucket_cap_mb = BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb
        with together(group):
            _require_elementwise(optimizer_class)
            if not self.bucket_cap_mb > 0:
                raise ValueError(f"bucket_cap_mb must be more than 0, not {bucket_cap_mb}")
            super().__init__(params, defaults)
            if not all(p.ndim for p in self._parameters()):
                raise ValueError("a parameter has no rows: give it a dimension")
        lines = [words("parameter", str(i), p) for i, p in enumerate(self._parameters())]
        require_same_lines([*lines, f"buckets of {self.bucket_cap_mb} MiB"], group)
        self.cut = Cut(group)
        # In the order in which backward comes to them: last layers first.
        trained = [p for p in self._parameters() if p.requires_grad][::-1]
        buckets = assign(trained, int(self.bucket_cap_mb * 2**20))
        self._flats = [FlatParameters(bucket, self.cut) for bucket in buckets]
        own = {p: rows for flat in self._flats for p, rows in flat.own.items()}
        self.own = {p: own[p] for p in self._parameters() if p in own}  # this rank's rows of each
        self.inner: Any = optimizer_class(  # it trains the rows
            [
                {**_options(each), "params": [self.own[p] for p in each["params"] if p in self.own]}
                for each in self.param_groups
            ],
            **defaults,
        )
        self.defaults = self.inner.defaults
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            outer.update(_options(inner))  # with all that were not given
        self._take_states()  # some make them at once

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's rows, and gather the others'. All ranks must call it."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        # 1. This rank's rows take their gradients.
        for parameter, own in self.own.items():
            gradient: Any = parameter.grad
            if gradient is not None:
                is_rows = hasattr(gradient, "placements")  # a DTensor
                own.grad = gradient.to_local() if is_rows else self.cut.own(gradient)

        # 2. The optimizer updates this rank's rows.
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(_options(outer))
        self.inner.step()
        self.inner.zero_grad()
        self._take_states()

        # 3. All ranks get the parameters.
        for wait in [wait for flat in self._flats for wait in flat.gather()]:
            wait()
        return loss

    def _take_states(self) -> None:
        for parameter, own in self.own.items():
            if own in self.inner.state:
                self.state[parameter] = self.inner.state[own]

    # ---- checkpoints -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """That of the bare optimizer; states of a parameter's shape are DTensors of it."""
        found, parameters = super().state_dict(), self._parameters()
        states = {
            number: {name: self.whole(parameters[number], value) for name, value in each.items()}
            for number, each in found["state"].items()
        }
        return {**found, "state": states}

    def whole(self, parameter: torch.Tensor, value: Any) -> Any:
        """A state of this rank's rows as one of all: a DTensor. A number as it is."""
        is_rows = isinstance(value, torch.Tensor) and value.ndim
        return self.cut.whole(value, like=parameter) if is_rows else value

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's rows of one from `state_dict`, or of the bare optimizer's, the same on
        every rank. Raises ValueError, and changes nothing, if it is of another model."""
        parameters = self._parameters()
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        by_number = dict(zip(numbers, parameters, strict=True))
        states = {
            number: {
                name: self._rows(by_number[number], name, value) for name, value in each.items()
            }
            for number, each in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": states})
        self.inner.state.clear()
        for parameter, own in self.own.items():
            if parameter in self.state:
                self.inner.state[own] = self.state[parameter]

    def _rows(self, parameter: nn.Parameter, name: str, value: Any) -> Any:
        if not getattr(value, "ndim", 0):
            return value
        if value.shape != parameter.shape:
            raise ValueError(
                f"this state_dict is of another model: {name} has shape {tuple(value.shape)}, and "
                f"its parameter {tuple(parameter.shape)}"
            )
        if hasattr(value, "placements"):
            return value.to_local()
        return self.cut.own(value).clone()


def is_elementwise(kind: type[Optimizer]) -> bool:
    """Whether its step looks at one element at a time. A subclass must say so itself."""
    return kind in ELEMENTWISE or bool(vars(kind).get("elementwise"))


def _require_elementwise(kind: Any) -> None:
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(f"optimizer_class must be an optimizer, not {kind!r}")
    if not is_elementwise(kind):
        raise TypeError(
            f"{kind.__name__} cannot train rows of parameters: it looks at more than one element "
            "at a time. Give ZeroRedundancyOptimizer an elementwise one, such as Adam; if this is "
            "one, let its class say elementwise = True"
        )


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
