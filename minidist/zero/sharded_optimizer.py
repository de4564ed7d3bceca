"""Stage 1 (lesson: zero): every rank holds the optimizer states of its shard of the parameters."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from minidist.common.agree import require_same, together
from minidist.common.groups import require_group
from minidist.common.refusals import refuse
from minidist.common.replicas import describe, refuse_dtensors, require_apart, require_replicas
from minidist.distributed_data_parallel.buckets import BUCKET_CAP_MB, assign
from minidist.zero.optimizer_states import gathered, is_elementwise, own_part
from minidist.zero.shards import FlatParameters, Piece, all_gather, require_strided
from minidist.zero.uneven import UnevenSteps

NOT_HERE = {
    "overlap_with_ddp": "here a step begins when the backward pass has ended. Gradients that leave "
    "meanwhile are those of ShardedDataParallel"
}


class ZeroRedundancyOptimizer(Optimizer, UnevenSteps):
    """Any elementwise optimizer, its states shared out over the ranks. ZeRO, stage 1. Lesson: zero.

        model = md.DistributedDataParallel(model)
        optimizer = md.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)

    A step updates the rank's shard, Ψ/N elements, and gathers the parameters from all ranks, in a
    message for each bucket. It reads the gradients in `.grad`, which must be the means
    over the ranks: those of `DistributedDataParallel`, torch's or ours, or of
    `ShardedDataParallel`. The parameters become views of one flat tensor for each bucket: move or
    convert a model before.

    params: as for any optimizer: parameters, pairs of name and parameter, or groups with options
        of their own. Those that are frozen now must stay so.
    optimizer_class: a class of optimizers that look at one element at a time: torch's SGD, Adam,
        AdamW and their kin, or one that says so, by `elementwise = True` in the class itself.
    process_group: the ranks that take part; None is the default group.
    parameters_as_bucket_view: of torch's class; what True says is always done here.
    overlap_with_ddp: of torch's class; False.
    bucket_cap_mb: a bucket is full at so many MiB (the first one at 1 MiB); None is 25. Smaller
        ones hold fewer gradients at once in stage 2, and are more messages.
    defaults: the optimizer's options.

    Where ranks have different numbers of batches, train within torch's `Join([ddp, optimizer])`. A
    rank that has none left takes a step after each backward pass that averages (with torch's own
    DDP: after each forward pass). So must the others: no GradScaler may skip one. Step a scheduler
    after the block, since a rank that has no batches left would not step its own.

    Learning-rate schedulers act on `param_groups` as ever. `state` holds the states of the rank's
    own pieces, flat; `shards` are these pieces, as parameters. After FairScale's OSS; the interface
    is that of torch's ZeroRedundancyOptimizer.

    Raises RuntimeError without a process group; TypeError for an optimizer_class that is none, or
    not elementwise, and for DTensors; ValueError for overlap_with_ddp, and, on every rank, if the
    ranks pass different parameters or options.
    """

    pieces: dict[torch.Tensor, Piece]  # what this rank owns, by the whole parameter

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = True,
        overlap_with_ddp: bool = False,
        *,
        bucket_cap_mb: float | None = None,
        **defaults: Any,
    ) -> None:
        self.process_group = require_group(process_group, "ZeroRedundancyOptimizer")
        self.bucket_cap_mb = BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb
        self._inner: Any = None  # it trains the pieces
        with together(self.process_group):
            if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
                raise TypeError(f"optimizer_class must be an optimizer, not {optimizer_class!r}")
            if not self.bucket_cap_mb > 0:
                raise ValueError(f"bucket_cap_mb must be more than 0, not {bucket_cap_mb}")
            refuse("ZeroRedundancyOptimizer", {"overlap_with_ddp": overlap_with_ddp}, NOT_HERE)
            if not is_elementwise(optimizer_class):
                known = optimizer_class.__module__.startswith("torch.")
                raise TypeError(
                    f"{optimizer_class.__name__} cannot train shards of parameters: it "
                    f"{'looks' if known else 'may look'} at more than one element at a time. Give "
                    "ZeroRedundancyOptimizer an elementwise one, such as Adam"
                    + ("" if known else "; if this is one, let its class say elementwise = True")
                )
            super().__init__(params, defaults)
            UnevenSteps.__init__(self)
        self.device = next(iter(self._parameters()), torch.empty(0)).device
        self._flats: list[FlatParameters] = []
        self.pieces = {}
        self._shared: set[nn.Parameter] = set()  # whose states are shared out
        self._known: set[nn.Parameter] = set()  # these, and the frozen ones
        self._whole_states: dict[int, dict[str, Any]] | None = None
        self._share_out(self.param_groups)
        self._inner = optimizer_class(list(map(self._own, self.param_groups)), **defaults)
        self._take_states()  # some make them at once
        self.defaults = self._inner.defaults
        self._take_options()  # with all that were not given

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As for any optimizer. All ranks must call it."""
        super().add_param_group(param_group)
        if self._inner is not None:
            *others, group = self.param_groups
            self._share_out([group])
            self._give_groups(others)  # which its parameters may have left
            self._inner.add_param_group(self._own(group))
            self._take_states()
            self._whole_states = None

    def _share_out(self, groups: list[dict[str, Any]]) -> None:
        """Partition the parameters of these groups, but for those that have been so in another."""
        parameters = [p for group in groups for p in group["params"]]
        require_replicas(parameters, self.process_group)
        found = _described(groups)
        require_same(self.process_group, found | {"bucket_cap_mb": self.bucket_cap_mb})
        refuse_dtensors(f"{name}, {text}" for name, text in found.items())
        trained = [p for p in parameters if p.requires_grad and p not in self._shared]
        with together(self.process_group):
            require_apart(trained, "ZeroRedundancyOptimizer")
        self._shared.update(trained)
        # In the order in which backward comes to them: last layers first.
        buckets = assign(trained[::-1], int(self.bucket_cap_mb * 2**20))
        flats = [FlatParameters(bucket, self.process_group) for bucket in buckets]
        self._flats += flats
        pieces = [piece for flat in flats for piece in flat.pieces]
        # A parameter may have no elements.
        own = [piece for piece in pieces if piece.own.numel() or not piece.whole.numel()]
        self.pieces |= {piece.whole: piece for piece in own}
        self._known.update(parameters)

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _own(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group of what this rank owns of a group's parameters, for its optimizer."""
        own = [self.pieces[p].own for p in group["params"] if p in self.pieces]
        return {**_options(group), "params": own}

    def _give_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups[:] = map(self._own, groups)

    def _take_options(self) -> None:
        for ours, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            ours.update(_options(inner))

    @property
    def shards(self) -> list[nn.Parameter]:
        """What this rank owns of each parameter: (n,), in the parameter's own memory."""
        return [piece.own for piece in self.pieces.values()]

    # ---- a step ----------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update this rank's shard, and gather the others'. All ranks must call it. `options` are
        those of the optimizer's own step.

        Raises RuntimeError if a parameter has been moved, converted or unfrozen since, or was put
        into a group by hand, or has a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._join_config.enable:
            self._take_from_one_that_trains()
        self._require_unchanged()
        self._whole_states = None

        # 1. Each piece takes its part of the gradients, beside what it holds already.
        held = {each.own: each.take() for each in self.pieces.values()}

        # 2. The optimizer updates this rank's shard.
        states = {self.pieces[p].own: s for p, s in self.state.items() if p in self.pieces}
        self._inner.state.clear()  # the user may have replaced or removed some
        self._inner.state.update(states)
        self._give_groups(self.param_groups)
        self._inner.step(**options)
        self._take_options()
        self._take_states()
        for own, gradient in held.items():
            own.grad = gradient

        # 3. All ranks get the parameters.
        for wait in [all_gather(flat.flat, self.process_group) for flat in self._flats]:
            wait()
        return loss

    def _take_states(self) -> None:
        for parameter, piece in self.pieces.items():
            if piece.own in self._inner.state:
                self.state[parameter] = self._inner.state[piece.own]

    def _require_unchanged(self) -> None:
        parameters = self._parameters()
        if not self._known.issuperset(parameters):
            raise RuntimeError("a parameter was put into a group by hand: use add_param_group")
        require_strided(parameters)
        if any(flat.moved() for flat in self._flats):
            raise RuntimeError(
                "a parameter has been moved or converted since the optimizer was made. Change a "
                "model first, and make its optimizer then"
            )
        if any(p.grad is not None for p in parameters if p not in self._shared):
            raise RuntimeError(
                "a parameter has a gradient that was frozen when the optimizer was made. Unfreeze "
                "it first, or add it then, by add_param_group"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the parameters, and of what `ShardedDataParallel` has left of their gradients."""
        super().zero_grad(set_to_none)
        for piece in self.pieces.values():
            piece.follow()  # what the user has kept of it stays
        self._inner.zero_grad(set_to_none)

    # ---- checkpoints -----------------------------------------------------------------------

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Gather the states of all ranks on rank `to` of the group, on its CPU; None is all ranks.
        All ranks must call it before `state_dict`, since the last step."""
        group = self.process_group
        whole = gathered(self._parameters(), self.pieces, self.state, group, to)
        if whole is not None:
            self._whole_states = whole

    def state_dict(self) -> dict[str, Any]:
        """That of the bare optimizer, whole: it loads at any world size, and without minidist.

        Raises RuntimeError if `consolidate_state_dict` has not gathered it on this rank.
        """
        if self._whole_states is None:
            raise RuntimeError(
                "the optimizer's states are on all ranks. First call, on every rank, "
                f"consolidate_state_dict(to={dist.get_rank(self.process_group)})"
            )
        return {**super().state_dict(), "state": self._whole_states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a whole one, the same on every rank: from `state_dict`, or from
        the bare optimizer, where parameters may have names for numbers. Raises ValueError, and
        changes nothing, if it is of another model."""
        self.load_shard_state_dict(own_part(state_dict, self._parameters(), self.pieces))

    def load_shard_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take one that has this rank's states already: those of its pieces, (n,), by the numbers
        of their parameters."""
        loaded: dict[str, Any] = {}  # as hooks before it have made it
        with self.register_load_state_dict_pre_hook(lambda _, state: loaded.update(state)):
            super().load_state_dict(state_dict)
        self._whole_states = None
        self._give_groups(self.param_groups)
        self._inner.state.clear()  # a parameter may have left its group
        # The optimizer takes its states itself: it knows of what dtype, and on which device. It
        # has the pieces in the order of their parameters, and numbers them alone.
        owned = [number for number, p in enumerate(self._parameters()) if p in self.pieces]
        states = {n: loaded["state"][k] for n, k in enumerate(owned) if k in loaded["state"]}
        self._inner.load_state_dict({**self._inner.state_dict(), "state": states})
        self._take_states()

    def __getstate__(self) -> Any:
        raise TypeError(
            "a ZeroRedundancyOptimizer cannot be copied or saved: it has a shard of parameters. "
            "Save its state_dict(), or make another one for a copy of the model"
        )


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _described(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks must have alike."""
    found: dict[str, Any] = {"the number of parameter groups": len(groups)}
    for number, group in enumerate(groups):
        found[f"the number of parameters in group {number}"] = len(group["params"])
        for position, parameter in enumerate(group["params"]):
            found[f"parameter {position} of group {number}"] = describe(parameter)
        found[f"the options of group {number}"] = {
            k: v for k, v in _options(group).items() if isinstance(v, bool | int | float | str)
        }
    return found
