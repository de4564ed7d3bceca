"""Before a step, ranks agree on the rows of the batch and the shapes of its activations.

The shapes depend on the inputs, which the first rank has, and on the state of each rank's layers: a
frozen parameter, a layer in evaluation mode. So each rank hashes what it knows, and the hashes of
all ranks are the key under which specs are cached. This takes 16 bytes from each rank, once a step;
and with a strategy around the stages, an all_reduce of 32 along its axis.

Keyword arguments without tensors, such as the number of the step, are broadcast here, when they
change.
"""

import copy
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves

from minidist.collectives.peers import Peers
from minidist.common import agree
from minidist.common.single import all_gather_single
from minidist.common.wrapper import Guard
from minidist.pipeline.specs import (
    PLAIN,
    ActivationSpecs,
    count_rows,
    infer_specs,
    rows_of,
    split_into_microbatches,
    tensors_of,
)
from minidist.pipeline.stage import Layers

Loss = Callable[[Any, Any], torch.Tensor]
FLAGS = type(None), bool, str, torch.dtype, torch.device
CACHE_SIZE = 64  # kinds of batches


@dataclass
class Batch:
    """What a rank knows of a batch.

    rows: of each micro-batch. inputs: for each micro-batch, what the first layer takes, and keyword
    arguments; on the rank of the first stage only. training: loss_fn and targets, used by the last
    stage; None: no backward pass. specs: of the activations that this rank sends and receives.
    """

    rows: Sequence[int]
    inputs: Sequence[tuple[Any, dict[str, Any]]]
    training: tuple[Loss, Any] | None
    specs: ActivationSpecs


class Preparation:
    """Before each step, makes all ranks agree on rows and shapes.

    module: this rank's layers; layers: the same, by stage. stages: of all ranks. keywords: all
    keyword arguments that some layer takes. device: of the activations.
    """

    def __init__(
        self,
        peers: Peers,
        module: nn.Module,
        layers: Mapping[int, Layers],
        stages: int,
        microbatches: int,
        keywords: Set[str],
        device: torch.device,
    ) -> None:
        self._peers, self._layers, self._stages = peers, layers, stages
        self._microbatches, self._keywords, self._device = microbatches, keywords, device
        self._modules, self._parameters = list(module.modules()), list(module.parameters())
        self._guard = Guard(module, "Pipeline")
        self._specs: dict[tuple[int, ...], ActivationSpecs] = {}  # the one used last comes last
        self._plain: dict[str, Any] = {}  # of the last step, for later stages

    def prepare(
        self, inputs: Any, kwargs: dict[str, Any], training: tuple[Loss, Any] | None
    ) -> Batch:
        """Every rank calls this. Raises on all of them if the batch of the first cannot be cut, or
        if the parameters of one have changed."""
        trains = training is not None
        seen, total, parts, problem = [trains, self._state()], 0, [], None
        plain, fresh = {n: value for n, value in kwargs.items() if not tensors_of(value)}, False
        try:
            if trains:
                self._guard.require_unchanged()
            if self._peers.rank == 0:
                total = self._count(inputs, kwargs, trains)
                batch = inputs, {n: value for n, value in kwargs.items() if n not in plain}
                parts = split_into_microbatches("inputs", batch, self._rows(total, trains))
                seen += [_signature(batch, PLAIN), _signature(plain, FLAGS)]
                fresh = repr(self._to_later(plain)) != repr(self._plain)
        except (TypeError, ValueError, RuntimeError) as error:
            problem = error
        # 63 bits: two states with one number are not to be expected.
        number = -1 if problem else hash(repr(seen)) & (2**63 - 1)
        mine = torch.tensor([number, 2 * total + fresh], device=self._peers.device)
        everyone = mine.new_empty(2 * self._peers.size)
        all_gather_single(everyone, mine, self._peers.group).wait()
        numbers, totals = everyone.view(-1, 2).T.tolist()
        total, fresh = divmod(totals[0], 2)
        failed, key = min(numbers) < 0, tuple(numbers)
        rows = [] if failed else self._rows(total, trains)
        sizes = [] if key in self._specs else sorted(set(rows))
        times = self._agree_over_replicas(failed, len(rows), len(sizes), problem)
        self._broadcast_plain(plain, fresh)
        specs = self._infer(sizes, rows, parts, trains) if sizes else self._specs.pop(key)
        if times > len(sizes):  # other replicas have new shapes
            self._infer(rows[-1:] * (times - len(sizes)), rows, parts, trains)
        self._specs[key] = specs
        if len(self._specs) > CACHE_SIZE:
            del self._specs[next(iter(self._specs))]
        return Batch(rows, parts, training, specs)

    def _to_later(self, plain: dict[str, Any]) -> dict[str, Any]:
        """On the first rank: the keyword arguments that layers of later stages take."""
        later = {name: value for name, value in plain.items() if name in self._layers[0].later}
        for name, value in later.items():
            for leaf in tree_leaves(value):
                if not isinstance(leaf, PLAIN):
                    raise TypeError(
                        "to other stages travel tensors, numbers, strings and None, in tuples, "
                        f"lists and dicts; in {name!r} there is a {type(leaf).__name__}"
                    )
        return later

    def _broadcast_plain(self, plain: dict[str, Any], fresh: bool) -> None:
        """Give all ranks the first rank's keyword arguments without tensors."""
        first = self._peers.rank == 0
        if fresh:
            message = [self._to_later(plain) if first else None]
            dist.broadcast_object_list(message, group=self._peers.group, group_src=0)
            assert message[0] is not None
            self._plain = copy.deepcopy(message[0])  # the user's own lists may change
        for layers in self._layers.values():
            layers.plain = plain if first else self._plain

    def _agree_over_replicas(
        self, failed: bool, count: int, dry_runs: int, problem: Exception | None
    ) -> int:
        """How many dry runs each stage makes. A strategy around a stage may gather its parameters
        for each run, so all ranks of the strategy must run it equally often. Raises on all of them
        if one has failed."""
        replicas = next(iter(self._layers.values())).groups
        counts = torch.tensor([failed, -count, count, dry_runs]).to(self._peers.device)
        for group in replicas:
            dist.all_reduce(counts, dist.ReduceOp.MAX, group)
        any_failed, negative_least, most, dry_runs = counts.tolist()
        if any_failed:
            assert self._peers.group is not None
            agree.raise_along([self._peers.group, *replicas], problem)
        if -negative_least != most:
            raise ValueError(
                "a strategy around the stages needs batches that all its ranks cut into as many "
                f"micro-batches: here they are {-negative_least} and {most}"
            )
        return int(dry_runs)

    def forget(self) -> None:
        """A step has failed: drop all cached specs. Every rank calls this."""
        self._specs.clear()

    def _infer(
        self, sizes: list[int], rows: list[int], parts: Sequence[Any], trains: bool
    ) -> ActivationSpecs:
        first = [(size, parts[rows.index(size)] if parts else None) for size in sizes]
        run = {stage: own.dry_run for stage, own in self._layers.items()}
        stages = self._stages - trains  # in training, nobody receives the last one's output
        with torch.set_grad_enabled(trains):
            return infer_specs(self._peers, stages, run, first, self._device)

    def _count(self, inputs: Any, kwargs: dict[str, Any], trains: bool) -> int:
        for name in kwargs.keys() - self._keywords:
            raise TypeError(f"no layer has an argument {name!r}")
        total, least = count_rows((inputs, kwargs)), self._microbatches if trains else 1
        if total < least:
            raise ValueError(f"a batch of {total} rows cannot be cut into {least} micro-batches")
        return total

    def _rows(self, total: int, trains: bool) -> list[int]:
        return rows_of(total, self._microbatches if trains else min(self._microbatches, total))

    def _state(self) -> Any:
        """What the specs of this rank's layers depend on, besides the inputs."""
        device = self._device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        modes = [module.training for module in self._modules]
        return autocast, modes, [(p.requires_grad, p.dtype) for p in self._parameters]


def _signature(tree: Any, by_value: tuple[type, ...]) -> Any:
    """Of each tensor the shape and dtype, of the types in `by_value` the value, of all else the
    type: a number that changes in each step must not look like another kind of batch."""
    leaves, structure = tree_flatten(tree)
    return structure, [
        (x.shape, x.dtype, x.requires_grad)
        if isinstance(x, torch.Tensor)
        else x
        if isinstance(x, by_value)
        else type(x)
        for x in leaves
    ]
