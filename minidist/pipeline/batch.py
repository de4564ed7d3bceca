"""Before a step: the batch in micro-batches, and the shapes of what stages send each other.

The receiver of an activation must know its spec (`stage`). For a batch of a new kind, each stage
runs one micro-batch of each size without effect, a dry run: the first stage with rows of the batch,
the others with tensors of ones, in the shapes that the stage before has found. The specs are
broadcast; after that only tensors are sent.

Specs depend on the inputs, which the first rank has, and on the state of each rank's layers: a
frozen parameter, a layer in evaluation mode. So each rank hashes what it knows, and the sum of the
hashes is the key under which specs are cached. That is one all_reduce of 32 bytes a step; and with
a strategy around the stages, another along its axis.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten

from minidist.collectives.peers import Peers
from minidist.common import agree
from minidist.common.found import Found
from minidist.common.tensors_in import tensors_of
from minidist.pipeline.instructions import Schedule
from minidist.pipeline.stage import FLAGS, PLAIN, ActivationSpec, Stage

Loss = Callable[[Any, Any], torch.Tensor]
ActivationSpecs = dict[tuple[int, int], ActivationSpec]  # of outputs, by stage and rows
CACHE_SIZE = 64  # kinds of batches


# ---- micro-batches -----------------------------------------------------------------------------


def split_into_microbatches(what: str, batch: Any, rows: Sequence[int]) -> list[Any]:
    """The micro-batches: tensors are split by rows, all else is the same in each. Raises ValueError
    for a tensor of another number of rows."""
    leaves, structure = tree_flatten(batch)
    total, columns = sum(rows), []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            columns.append([leaf] * len(rows))
        elif leaf.ndim == 0:
            # A view, as those by rows are: backward goes on to the tensor of the batch.
            columns.append([leaf.view(()) for _ in rows])
        elif len(leaf) == total:
            columns.append(list(leaf.split(list(rows))))
        else:
            found = tuple(leaf.shape)
            raise ValueError(f"the {what} of a batch of {total} rows have as many, not {found}")
    parts = zip(*columns, strict=True) if columns else [()] * len(rows)
    return [tree_unflatten(list(part), structure) for part in parts]


def cut_off(batch: Any) -> tuple[Any, Callable[[], None]]:
    """The batch without the graph that has made its tensors, and a function that gives that graph
    their gradients, once: backward of the first micro-batch would free it for all others."""
    made = [x for x in tensors_of(batch) if x.requires_grad]
    leaves = [x.detach().requires_grad_() for x in made]
    left = iter(leaves)

    def go_on() -> None:
        pairs = [(x, y.grad) for x, y in zip(made, leaves, strict=True) if y.grad is not None]
        torch.autograd.backward([x for x, _ in pairs], [gradient for _, gradient in pairs])

    return tree_map_only(torch.Tensor, lambda x: next(left) if x.requires_grad else x, batch), go_on


def merge_microbatches(parts: Sequence[Any]) -> Any:
    """The batch: tensors are concatenated, all else comes from the first micro-batch."""

    def merge(first: Any, *others: Any) -> Any:
        if not isinstance(first, torch.Tensor):
            return first
        return torch.cat([first, *others]) if first.ndim else torch.stack([first, *others])

    return tree_map(merge, *parts)


# ---- what all ranks agree on -------------------------------------------------------------------


@dataclass
class Batch:
    """What a rank knows of a batch.

    rows: of each micro-batch. inputs: for each micro-batch, what the first layer takes, and keyword
    arguments; on the rank of the first stage only. training: loss_fn and targets, used by the last
    stage; None: no backward pass. specs: of the outputs of all stages.
    """

    rows: Sequence[int]
    inputs: Sequence[tuple[Any, dict[str, Any]]]
    training: tuple[Loss, Any] | None
    specs: ActivationSpecs


class Preparation:
    """Makes all ranks agree on rows and specs, before each step.

    plan: of a training step. module: this rank's layers; own: its stages. keywords: all keyword
    arguments that some layer takes. device: of the activations.
    """

    def __init__(
        self,
        plan: Schedule,
        peers: Peers,
        module: nn.Module,
        own: Mapping[int, Stage],
        keywords: Set[str],
        device: torch.device,
    ) -> None:
        self._plan, self._peers, self._own = plan, peers, own
        self._keywords, self._device = keywords, device
        self._modules, self._parameters = list(module.modules()), list(module.parameters())
        self._found = Found(module, {*module.modules()} - {module}, "Pipeline")
        self.specs: dict[int, ActivationSpecs] = {}  # the one used last comes last
        self._plain = pickle.dumps({})  # keyword arguments without tensors, for later stages

    def prepare(
        self,
        module: nn.Module,
        inputs: Any,
        kwargs: dict[str, Any],
        training: tuple[Loss, Any] | None,
    ) -> Batch:
        """Every rank calls this. Raises on all of them if the batch of the first cannot be cut, or
        if the parameters or layers of one have changed. module: what the pipeline has now."""
        trains, first = training is not None, self._peers.rank == 0
        plain = {name: value for name, value in kwargs.items() if not tensors_of(value)}
        seen, total, parts, to_later, problem = [trains, self._state()], 0, [], self._plain, None
        try:
            self._found.require_unchanged(module, trains)
            if first:
                total = self._count(inputs, kwargs, trains)
                batch = inputs, {n: value for n, value in kwargs.items() if n not in plain}
                parts = split_into_microbatches("inputs", batch, self._rows(total))
                seen += [_signature(batch, PLAIN), _signature(plain, FLAGS)]
                later = self._own[0].later
                to_later = pickle.dumps({n: value for n, value in plain.items() if n in later})
        except Exception as error:
            problem = error
        number = hash(repr((self._peers.rank, seen))) >> 16  # 48 bits: the sum fits into 64
        mine = [number, total, to_later != self._plain, problem is not None]
        sums = torch.tensor(mine, device=self._peers.device)
        dist.all_reduce(sums, group=self._peers.group)
        key, total, fresh, failed = sums.tolist()
        rows = [] if failed else self._rows(total)
        new = self._agree_along_strategy(key not in self.specs, len(rows), bool(failed), problem)
        self._pass_on(plain, to_later, bool(fresh))
        specs = self._infer(rows, parts, trains) if new else self.specs[key]
        self.specs.pop(key, None)
        self.specs[key] = specs
        if len(self.specs) > CACHE_SIZE:
            del self.specs[next(iter(self.specs))]
        return Batch(rows, parts, training, specs)

    def _agree_along_strategy(
        self, new: bool, count: int, failed: bool, problem: Exception | None
    ) -> bool:
        """Whether stages make dry runs. A strategy around a stage may gather its parameters for
        each run, so all ranks of the strategy must run it equally often. Raises on all of them if
        one has failed."""
        groups = self._strategy
        largest = torch.tensor([new, failed, count, -count]).to(self._peers.device)
        for group in groups:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        new, failed, most, negative_least = largest.tolist()
        if failed:
            assert self._peers.group is not None
            agree.raise_on_every_rank(problem, self._peers.group, *groups)
        if most != -negative_least:
            raise ValueError(
                "a strategy around the stages needs batches that all its ranks cut into as many "
                f"micro-batches: here they are {-negative_least} and {most}"
            )
        return bool(new)

    @property
    def _strategy(self) -> Sequence[dist.ProcessGroup]:
        """The groups of the strategy around the stages, if there is one."""
        return next(iter(self._own.values())).groups

    def _pass_on(self, plain: dict[str, Any], to_later: bytes, fresh: bool) -> None:
        """Keyword arguments without tensors go to all ranks when they have changed."""
        if fresh:
            message = [to_later]
            dist.broadcast_object_list(message, group=self._peers.group, group_src=0)
            self._plain = message[0]
        for stage in self._own.values():
            stage.plain = plain if self._peers.rank == 0 else pickle.loads(self._plain)

    def _infer(self, rows: list[int], parts: Sequence[Any], trains: bool) -> ActivationSpecs:
        """The specs of the outputs of all stages, on every rank; in training without the last one,
        whose output nobody receives. All ranks call this, and all raise if one fails."""
        group = self._peers.group
        assert group is not None
        found: ActivationSpecs = {}
        alike = rows[0] == rows[-1] and not self._strategy
        for i in [0] if alike else [0, len(rows) - 1]:  # the largest micro-batch, and the smallest
            activation: Any = parts[i] if parts else None
            for stage in range(self._plan.stages - trains):
                message = [None]
                with agree.together(group):
                    if stage in self._own:
                        message = [self._dry_run(stage, activation, trains).tree()]
                source = self._plan.rank_of(stage)
                dist.broadcast_object_list(message, group=group, group_src=source)
                spec = ActivationSpec(*tree_flatten(message[0]))
                found[stage, rows[i]] = spec
                activation = spec.ones(self._device) if stage + 1 in self._own else None
        return found

    def _dry_run(self, stage: int, activation: Any, trains: bool) -> ActivationSpec:
        try:
            with torch.set_grad_enabled(trains):
                return ActivationSpec.of(self._own[stage].dry_run(activation))
        except Exception as error:
            error.add_note(f"(at Forward({stage}, 0) of the pipeline)")
            raise

    def _count(self, inputs: Any, kwargs: dict[str, Any], trains: bool) -> int:
        """The rows of a batch: the length of the first tensor in it."""
        for name in kwargs.keys() - self._keywords:
            raise TypeError(f"no layer has an argument {name!r}")
        total = next((len(x) for x in tensors_of((inputs, kwargs)) if x.ndim), None)
        if total is None:
            raise TypeError(
                "the inputs of a pipeline are a tensor, its rows first, or several of these"
            )
        least = self._plan.microbatches if trains else 1
        if total < least:
            raise ValueError(f"a batch of {total} rows cannot be cut into {least} micro-batches")
        return total

    def _rows(self, total: int) -> list[int]:
        """The rows of each micro-batch, as even as possible: the first ones get the remainder."""
        microbatches = min(self._plan.microbatches, total)
        small, larger = divmod(total, microbatches)
        return [small + (i < larger) for i in range(microbatches)]

    def _state(self) -> Any:
        """What the specs of this rank's layers depend on, besides the inputs."""
        device = self._device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        modes = [module.training for module in self._modules]
        return autocast, modes, [(p.requires_grad, p.dtype) for p in self._parameters]


def _signature(tree: Any, by_value: tuple[type, ...]) -> Any:
    """Of each tensor the shape and dtype, of the types in `by_value` the value, of all else the
    type: a number that changes in each step must not look like another kind of batch."""

    def of(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.shape, x.dtype, x.requires_grad
        return x if isinstance(x, by_value) else type(x)

    leaves, structure = tree_flatten(tree)
    return structure, [of(x) for x in leaves]
