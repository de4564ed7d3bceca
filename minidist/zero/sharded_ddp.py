"""Stage 2 (lesson: zero): a rank also holds no more of the gradients than its shard.

As in DistributedDataParallel they leave in buckets while backward still computes, and each rank
adds its own. But a rank gets back its shard of the mean alone, and the memory of the bucket ends
there: one bucket fills while another travels, and the whole gradient is never in memory at once.
"""

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

from minidist import backend
from minidist.common.agree import together
from minidist.common.no_sync import Synchronized
from minidist.common.norm import clip_grad_norm_, mark_parts
from minidist.common.replicas import broadcast_state, require_same_model
from minidist.common.wrapper import Guard
from minidist.distributed_data_parallel.buckets import Bucket, Buckets
from minidist.distributed_data_parallel.reducer import Reducer, remove
from minidist.zero.sharded_optimizer import ZeroRedundancyOptimizer
from minidist.zero.shards import (
    FlatParameters,
    GradientInShards,
    Piece,
    reduce_scatter,
    require_strided,
)


class PassingBucket(Bucket):
    """The gradients of `FlatParameters`, with the same padding. Its memory is there from the first
    gradient until the bucket has travelled."""

    def allocate(self) -> torch.Tensor:
        """(N S,)"""
        first, padding = self._parameters[0], -self._size % dist.get_world_size(self._group)
        flat = backend.scratch(
            self._size + padding, dtype=first.dtype, device=first.device, group=self._group
        )
        flat[self._size :] = 0
        return flat

    def free(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters:
            parameter.grad = None
        del self._flat, self._views


class ShardBuckets(Buckets):
    """Give each rank of `group` its shard of the mean gradients, in the `.grad` of the pieces of
    `flats`. The parameters' own `.grad` then stands for those of all ranks: `GradientInShards`."""

    def __init__(self, flats: Sequence[FlatParameters], group: dist.ProcessGroup) -> None:
        parameters = [parameter for flat in flats for parameter in flat.parameters]
        self._pieces = {piece.whole: piece for flat in flats for piece in flat.pieces}
        self._in_both: set[nn.Parameter] = set()  # of this pass: a bucket has theirs, and shards
        self._shards: list[torch.Tensor] = []  # of the mean: (S,) of each bucket that has arrived
        super().__init__(flats, group)
        # A parameter does not hold its node, and the node holds this hook.
        self._nodes = [get_gradient_edge(parameter).node for parameter in parameters]
        hooks: list[Any] = []
        for flat in flats:
            remove(flat.hooks)  # an earlier wrapper's of this optimizer: two would undo each other
            flat.hooks = hooks
        for parameter, node in zip(parameters, self._nodes, strict=True):
            if isinstance(parameter.grad, GradientInShards):  # of an earlier wrapper: none of ours
                parameter.grad = None
            hooks.append(node.register_prehook(partial(_make_room, self._pieces[parameter])))
        weakref.finalize(self, remove, hooks)

    def _make_bucket(self, index: int) -> PassingBucket:
        last = index == len(self._plan) - 1
        return PassingBucket(index, self._plan[index].parameters, last, self._group)

    def stay(self, parameter: nn.Parameter) -> None:
        """Its gradient stays where it is, beside what is in shards. It is not all of it, so torch
        shall not clip by it."""
        piece = self._pieces[parameter]
        piece.follow()
        if piece.known is not None:
            mark_parts([parameter])

    def hold(self, parameter: nn.Parameter) -> None:
        """It waits in its bucket, beside what is in shards."""
        if not isinstance(parameter.grad, GradientInShards):
            _make_room(self._pieces[parameter])  # it becomes another tensor
            super().hold(parameter)
        self.stay(parameter)

    def add(self, parameter: nn.Parameter) -> None:
        """Its gradient joins those that leave; what is in shards stays where it is."""
        piece = self._pieces[parameter]
        _make_room(piece)  # if the pass has left it out
        if piece.coming:
            self._in_both.add(parameter)
        super().add(parameter)

    def _send(self, bucket: Any) -> None:
        self.wait()  # so that no more than one travels
        self._travelling = [(bucket, reduce_scatter(bucket.buffer(), self._group))]

    def wait(self) -> None:
        """Until the last one has come back."""
        for bucket, arrive in self._travelling:
            self._shards.append(arrive())
            bucket.free()
        self._travelling = []

    def give(self, used: Iterable[nn.Parameter]) -> None:
        """These have a gradient on one rank at least: each rank adds its shard of the mean. All
        others' `.grad` stays None, and the optimizer passes over them."""
        found = set(used)
        for flat, shard in zip(self._plan, self._shards, strict=True):
            for piece in flat.pieces:
                if piece.whole in found:
                    part = shard[piece.place].detach()  # as DDP's
                    if piece.own.grad is not None:
                        piece.own.grad += part
                    else:  # one of no elements would hold the memory of all
                        piece.own.grad = part if part.numel() else part.clone()
        self._stand_in(found)

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """This rank's part of their whole gradients joins what is in shards."""
        require_strided(parameters)
        for parameter in parameters:
            own: Any = self._pieces[parameter].own
            if self._pieces[parameter].take() is None:
                own.grad = own.grad.clone()  # no view of what may be the user's
        self._stand_in(parameters)

    def _stand_in(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            piece = self._pieces[parameter]
            parameter.grad = piece.known = GradientInShards(piece, self._group)
            piece.coming = False

    def empty(self) -> None:
        """Wait for all gradients of the next backward pass. If this one has failed, what was in
        shards before it is there as it was; what lay beside that may be lost."""
        for parameter, piece in self._pieces.items():
            if piece.coming and (parameter in self._in_both or parameter.grad is None):
                self._stand_in([parameter])
            elif piece.coming:
                self.stay(parameter)
        super().empty()
        self._in_both, self._shards = set(), []


def _make_room(piece: Piece, *given: Any) -> None:
    """For a gradient that is whole: what is in shards stays there, unless the user has replaced or
    removed the parameter's `.grad`."""
    if given and given[0][0] is None:
        return  # a Function of the user's has none for it, so nothing comes
    piece.follow()
    # Not to hold the memory of a gradient until all have travelled.
    piece.coming, piece.known = piece.known is not None, None
    if isinstance(piece.whole.grad, GradientInShards) and piece.whole.grad.piece is piece:
        piece.whole.grad = None  # and nothing, if this hook is an earlier wrapper's


class ShardedDataParallel(Synchronized):
    """Trains replicas of `module` whose gradients and optimizer states are shared out. ZeRO, stage
    2. Lesson: zero.

        optimizer = md.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
        model = md.ShardedDataParallel(model, optimizer)

    Train as with `DistributedDataParallel`, with this optimizer. When `backward()` returns, the
    mean of the gradients is where its optimizer is: each rank has its shard, in the `.grad` of
    `optimizer.shards`. A parameter's own `.grad` has no elements: clipping by torch.nn.utils takes
    its norm over all shards and scales them, a mask or noise is cut as it is, all else raises. A
    parameter without gradient on some ranks counts there as zero; on all ranks, its `.grad` stays
    None, and the optimizer passes over it. What a pass gives that is not averaged, within `no_sync`
    or by the bare module, lies in `.grad` beside the shards: a step takes both, and the next
    averaged pass or `clip_grad_norm_` adds it to them. After FairScale's ShardedDDP.

    optimizer: a `ZeroRedundancyOptimizer` of all parameters of the module that are trained, or
        several that share them. Their gradients leave in buckets, the last parameters first: as
        backward comes to them, if an optimizer has the order of the module. Else more of them wait
        in memory.

    At construction, and for buffers before each forward pass, every rank takes what rank 0 has.
    Raises TypeError for another optimizer; ValueError, on every rank, if the ranks have different
    models, or the optimizers have other groups, or other parameters than the module. `backward`
    raises RuntimeError as that of `DistributedDataParallel` does, and methods are
    `model.module`'s alone.
    """

    process_group: dist.ProcessGroup

    def __init__(
        self,
        module: nn.Module,
        optimizer: ZeroRedundancyOptimizer | Sequence[ZeroRedundancyOptimizer],
    ) -> None:
        super().__init__(module)
        optimizers: list[Any] = [optimizer]
        if isinstance(optimizer, list | tuple) and optimizer:
            optimizers = list(optimizer)
        for each in optimizers:
            if not isinstance(each, ZeroRedundancyOptimizer):
                raise TypeError(
                    "ShardedDataParallel needs a ZeroRedundancyOptimizer, which knows who owns "
                    f"what, not {type(each).__name__}"
                )
        group = optimizers[0].process_group
        flats = [flat for each in optimizers for flat in each._flats]
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        owned = [parameter for flat in flats for parameter in flat.parameters]
        with together(group):
            if any(group is not each.process_group for each in optimizers):
                raise ValueError("the optimizers were made for different process groups")
            _require_one_owner(trained, owned)
        require_same_model(module, group)
        broadcast_state([*module.parameters(), *module.buffers()], group)
        self.process_group = group
        self._optimizers = optimizers
        self._stale_buffers = True  # rank 0 may change some until the first pass
        self._guard = Guard(module, "ShardedDataParallel")
        self._buckets = ShardBuckets(flats, group)
        self._reducer = Reducer(self, trained, group, self._buckets, find_unused_parameters=True)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own. A pass that trains leaves other buffers on each rank: the next pass
        takes rank 0's."""
        if self._reducer.begun:  # computed again within its backward pass, by a checkpoint
            return self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():
            self._guard.require_unchanged(self.module)
        if self._stale_buffers and (buffers := list(self.module.buffers())):
            broadcast_state(buffers, self.process_group)
        self._stale_buffers = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled():
            self._reducer.expect(self.require_backward_grad_sync)
        output = self.module(*inputs, **kwargs)
        self._reducer.watch(output)
        return output

    def __getstate__(self) -> Any:
        raise TypeError(
            "a ShardedDataParallel cannot be copied or saved: its optimizer has its gradients. "
            "Copy its module, or save its state_dict()"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the parameters, and of this rank's shards."""
        super().zero_grad(set_to_none)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that their norm, that of all shards together, is at most
        `max_norm`. Returns what it was, a number. All ranks must call it.

        torch.nn.utils.clip_grad_norm_ does the same, by one all_reduce for each parameter. After a
        pass that was not averaged it raises RuntimeError: more of the gradient is in shards.
        """
        # Whole are those that the user has set, and those of passes that were not averaged.
        given = [p for p in self._reducer.parameters if p.grad is not None]
        self._buckets.take([p for p in given if not isinstance(p.grad, GradientInShards)])
        pieces = [x for optimizer in self._optimizers for x in optimizer.pieces.values()]
        for piece in pieces:
            piece.follow()
        # The user may have removed one.
        shards = [piece.own for piece in pieces if piece.whole.grad is not None]
        device = next(self.module.parameters()).device
        groups = [self.process_group]
        return clip_grad_norm_(shards, max_norm, norm_type, groups=groups, device=device)


def _require_one_owner(trained: dict[str, nn.Parameter], owned: list[nn.Parameter]) -> None:
    once = set(owned)
    if missing := [name for name, parameter in trained.items() if parameter not in once]:
        raise ValueError(
            f"the optimizer does not have the module's parameter {missing[0]}: make it of "
            "module.parameters(), after the module is moved, unfrozen or changed"
        )
    if twice := len(owned) - len(once):
        raise ValueError(f"{twice} parameters are in two optimizers: each needs one owner")
    if more := len(owned) - len(trained):
        raise ValueError(
            f"the optimizer has {more} parameters that the module does not train: give "
            "ShardedDataParallel the whole model"
        )
