"""Tensors in N shards of one size, one for each rank (lesson: zero): who owns what, and the two
collectives, on a flat tensor x of (N S,).

Parameters are laid end to end and cut: through the middle of one where it has to be. So each rank
owns the N-th part of every bucket whatever the parameters' sizes, even if one embedding is half of
the model: Ψ/N elements, but for the padding that makes each bucket a multiple of N.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist import backend
from minidist.common.norm import norms_over_ranks
from minidist.common.single import all_gather_single, reduce_scatter_single
from minidist.distributed_data_parallel.buckets import dense_strides

# Gloo makes an all_gather of copies, and a reduce_scatter of a whole all_reduce. N broadcasts, or N
# reductions, of a shard each do the same up to four times faster.
_BY_SHARD = "gloo"

# Of what torch does in place to each element, what it has no tag for.
_BY_ELEMENT = {"abs_", "copy_", "copysign_", "detach_", "fill_", "floor_divide_", "heaviside_"}
_BY_ELEMENT |= {"masked_fill_", "threshold_", "zero_"}


# ---- who owns what -----------------------------------------------------------------------------


def require_strided(parameters: Iterable[torch.Tensor]) -> None:
    """Raises RuntimeError for a sparse gradient."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if any(gradient.layout is not torch.strided for gradient in gradients):
        raise RuntimeError("a sparse gradient cannot be cut into shards: sparse=True")


@dataclass
class Piece:
    """What a rank owns of one parameter. Of some these are no elements."""

    whole: nn.Parameter
    span: slice  # which elements of it, in the order in which they lie in memory
    own: nn.Parameter  # these elements (n,), in the same memory: the rank's optimizer trains them
    place: slice  # where they are in the rank's shard of the bucket
    # The parameter's `.grad`, if that of `own` belongs to it: in shards, or what has come since by
    # a pass that was not averaged, to be added.
    known: torch.Tensor | None = None
    coming: bool = False  # a pass is giving it a gradient, which will be known

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same elements of a tensor that belongs to the parameter and has its shape: (n,). A
        view, if the tensor is laid out as the parameter is."""
        strides = self.whole.stride()
        if tensor.stride() != strides:
            tensor = tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))[self.span]

    def follow(self) -> None:
        """The gradient of `own` is that of the parameter, which the user may have removed, replaced
        or put back."""
        gradient: Any = self.whole.grad
        in_shards = isinstance(gradient, GradientInShards) and gradient.piece is self
        if self.coming and not in_shards:
            self.known = gradient
        self.coming = False
        if gradient is None or gradient is not self.known:
            self.own.grad = gradient.kept if in_shards else None
            self.known = gradient if in_shards else None

    def take(self) -> torch.Tensor | None:
        """Add this rank's part of a whole gradient to that of `own`. Returns what that was."""
        gradient: Any = self.whole.grad
        self.follow()
        held = self.own.grad
        if gradient is not None and not isinstance(gradient, GradientInShards):
            part = self.of(gradient.detach())
            self.own.grad = part if held is None else held + part
        return held


class FlatParameters:
    """Parameters of one dtype and device, in one flat tensor that the ranks own in equal shards.

    From now on the parameters are views of it: what a rank sends is already together, and what it
    receives arrives where the model reads it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.parameters = list(parameters)
        *offsets, used = accumulate((p.numel() for p in parameters), initial=0)
        self.shard = -(-used // size)  # elements
        first = parameters[0]
        # (N S,), where ranks share memory in that: all_gather then has nothing to stage.
        self.flat = backend.empty(
            self.shard * size, dtype=first.dtype, device=first.device, group=group
        )
        self.flat[used:] = 0
        self.pieces: list[Piece] = []  # one of each parameter
        self.hooks: list[Any] = []  # of the wrapper that was made last
        mine = range(rank * self.shard, (rank + 1) * self.shard)
        for parameter, offset in zip(parameters, offsets, strict=True):
            view = self.flat.as_strided(parameter.shape, dense_strides(parameter), offset)
            parameter.data = view.copy_(parameter.data)
            start = max(mine.start, offset)
            stop = max(start, min(mine.stop, offset + parameter.numel()))
            own = nn.Parameter(self.flat[start:stop])
            span = slice(start - offset, stop - offset)
            place = slice(start - mine.start, stop - mine.start)
            self.pieces.append(Piece(parameter, span, own, place))

    def moved(self) -> bool:
        """Whether a parameter is no longer in the flat tensor's memory."""
        here = self.flat.untyped_storage()._cdata
        return any(p.untyped_storage()._cdata != here for p in self.parameters)


class GradientInShards(torch.Tensor):
    """The `.grad` of a parameter whose gradient is in shards, one on each rank: without elements
    or memory. If it were None, torch.nn.utils.clip_grad_norm_ would clip nothing, without a word.

    Its norms are those of the whole gradient: all ranks must take them. What is done in place to
    each element, as clipping does, is done to this rank's shard. All else raises RuntimeError."""

    piece: Piece
    group: dist.ProcessGroup
    kept: torch.Tensor  # this rank's part: (n,), of no elements on some ranks

    @staticmethod
    def __new__(cls, piece: Piece, group: dist.ProcessGroup) -> "GradientInShards":
        whole, mine = piece.whole, piece.own.grad
        made: GradientInShards = torch.Tensor._make_wrapper_subclass(
            cls,
            whole.shape,
            strides=whole.stride(),
            dtype=whole.dtype,
            device=whole.device,
            storage_size=0,
        )
        made.piece, made.group = piece, group
        made.kept = whole.new_empty(0) if mine is None else mine
        return made

    @property
    def shard(self) -> torch.Tensor:
        """This rank's part, as it is now; of one that is no longer the parameter's, as it was."""
        if self.piece.whole.grad is not self:
            return self.kept
        self.piece.follow()
        mine = self.piece.own.grad
        return self.kept[:0] if mine is None else mine

    def cut(self, value: Any) -> Any:
        """This rank's part of a tensor that belongs to the parameter; a number as it is."""
        if isinstance(value, GradientInShards):
            return value.shard
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        return self.piece.of(value.expand(self.shape))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GradientInShards(of shape {tuple(self.shape)})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        several = isinstance(args[0], list)
        gradients = args[0] if several else args[:1]
        own = [gradient for gradient in gradients if isinstance(gradient, cls)]
        of_all = not any(args[2:]) and not kwargs  # not of rows, nor in another dtype
        if name in ("linalg_vector_norm", "_foreach_norm") and of_all:
            norm_type, first = args[1] if len(args) > 1 else 2, own[0]
            shards = [gradient.shard for gradient in own]
            found = iter(norms_over_ranks(shards, norm_type, first.group, first.device))
            norms = [
                next(found) if isinstance(g, cls) else func([g], norm_type)[0] for g in gradients
            ]
            return norms if several else norms[0]
        if "non_finite_check" in name:
            raise RuntimeError(
                "torch.amp.GradScaler looks at one rank's gradients, and here each rank has other "
                "ones: use minidist.ShardedGradScaler"
            )
        if name == "detach":  # or `.data`: the same shard
            same = cls(own[0].piece, own[0].group)
            same.kept = own[0].shard
            return same
        by_element = name.startswith("_foreach_") or name in _BY_ELEMENT
        by_element = by_element or torch.Tag.pointwise in func.tags
        if not (by_element and name.endswith("_") and own):
            raise RuntimeError(
                "this parameter's gradient is in shards, one on each rank: in the .grad of the "
                f"optimizer's `shards`. Its whole is nowhere, so there is no {name} of it. The "
                "optimizer that takes steps is the one of the ShardedDataParallel"
            )

        def cut(each: Any) -> Any:
            if not several:
                return gradients[0].cut(each)
            if not isinstance(each, list | tuple):
                return each
            pairs = zip(gradients, each, strict=True)
            return [g.cut(value) if isinstance(g, cls) else value for g, value in pairs]

        func(*map(cut, args), **(kwargs or {}))
        return None if several else args[0]  # as torch's own


# ---- the two collectives -----------------------------------------------------------------------


def all_gather(
    x: torch.Tensor, group: dist.ProcessGroup, own: torch.Tensor | None = None
) -> Callable[[], None]:
    """Begin to give every rank all shards. Each has its `own` (S,), in its place in x if that is
    None. Returns the function that waits."""
    shards = x.chunk(dist.get_world_size(group))
    place = shards[dist.get_rank(group)]
    if dist.get_backend(group) == _BY_SHARD:
        if own is not None:
            place.copy_(own)
        works: list[Any] = [
            dist.broadcast(shard, group=group, group_src=rank, async_op=True)
            for rank, shard in enumerate(shards)
        ]
    else:
        works = [all_gather_single(x, place if own is None else own, group)]
    return lambda: _wait(works)


def all_gather_each(
    places: Sequence[torch.Tensor], group: dist.ProcessGroup, own: torch.Tensor
) -> Callable[[], None]:
    """Begin to put all shards of several tensors into their places, (N n,) each, in one message.
    `own` (S,) has this rank's, end to end. Returns the function that waits."""
    if len(places) == 1:
        return all_gather(places[0], group, own)
    ranks = dist.get_world_size(group)
    sizes = [len(place) // ranks for place in places]
    if dist.get_backend(group) == "shm":  # it writes each where it belongs
        shm: Any = group
        work = shm.all_gather_single_coalesced(list(places), list(own.split(sizes)))
        return lambda: _wait([work])
    gathered = own.new_empty(ranks * len(own))
    arrive = all_gather(gathered, group, own)

    def wait() -> None:
        arrive()
        for place, shards in zip(places, gathered.view(ranks, -1).split(sizes, 1), strict=True):
            place.view(ranks, -1).copy_(shards)

    return wait


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Begin to add up the ranks' tensors. Returns the function that waits, and gives this rank's
    shard of the sum: (S,), in memory of its own. What is left in x is not to be used."""
    shards = x.chunk(dist.get_world_size(group))
    own = shards[dist.get_rank(group)]
    total = torch.empty_like(own)
    if by_shard := dist.get_backend(group) == _BY_SHARD:
        works: list[Any] = [
            dist.reduce(shard, group=group, group_dst=rank, async_op=True)
            for rank, shard in enumerate(shards)
        ]
    else:
        works = [reduce_scatter_single(total, x, group)]

    def wait() -> torch.Tensor:
        _wait(works)
        return total.copy_(own) if by_shard else total

    return wait


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()
