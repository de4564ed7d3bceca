"""The gradient of a flat parameter: on every rank whole, then in shards. Lesson: fully_sharded

gradient (N S,), of this rank  --reduce_scatter-->  total (S,), this rank's shard of the mean
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from minidist import backend
from minidist.zero.messages import reduce_scatter

if TYPE_CHECKING:
    from minidist.fully_sharded.flat import FlatParameter


CHANGED = (
    "was changed after a pass within no_sync(). There it is only a part of this rank's gradient, "
    "which is not reduced yet. Scale the loss instead, or change .grad after the pass that reduces"
)


class ShardGradient(torch.Tensor):
    """The `.grad` of a piece: an ordinary tensor, except that it refuses to be taken for the whole
    gradient. Ranks that scale by the norms of their own shards scale differently."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raises RuntimeError for a norm."""
        name = func.__name__
        if name.endswith("norm"):
            raise RuntimeError(
                "this .grad is only a rank's shard of a gradient, and so its norm is another one "
                "on each rank. Instead of torch.nn.utils.clip_grad_norm_, call clip_grad_norm_ of "
                "the FullyShardedDataParallel. Optimizers that take norms (LARS, Muon) do not work"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if name == "clone" or name.endswith("_like") or not isinstance(result, torch.Tensor):
            return result  # states of optimizers are ordinary tensors
        of_gradient = isinstance(args[0], cls) and result.numel() == args[0].numel()
        return result.as_subclass(cls) if of_gradient and result is not args[0] else result


class FlatGradient:
    """What a backward pass has made of it, and what travels."""

    def __init__(self) -> None:
        self.whole: torch.Tensor | None = None  # (N S,), not yet reduced
        self.touched: set[int] = set()  # slots with a gradient
        self.kept = False  # a pass without synchronization has come to it; to be reduced later
        self.total: torch.Tensor | None = None  # (S,), the mean
        self._end: Callable[[], torch.Tensor] | None = None
        self._notes: list[tuple[torch.Tensor, int, torch.Tensor | None] | None] = []

    def add(self, flat: "FlatParameter", gradients: Sequence[torch.Tensor | None]) -> None:
        """Put gradients of the parameters, divided by the number of ranks, into the flat one. None
        counts as zero."""
        scale, fresh = 1 / flat.kind.ranks, self.whole is None
        if self.whole is None:
            self.whole = backend.scratch(
                len(flat.whole), dtype=flat.shard.dtype, device=flat.kind.device, group=flat.group
            )
            self.whole[flat.used :] = 0
        for number, (view, g) in enumerate(zip(flat.views(self.whole), gradients, strict=True)):
            if g is None:
                if fresh:
                    view.zero_()
                continue
            if g.layout is not torch.strided:
                raise RuntimeError("a sparse gradient cannot be cut into shards: sparse=True")
            self.touched.add(number)
            if fresh:
                torch.mul(g, scale, out=view)
            else:
                view.add_(g, alpha=scale)

    def reduce(self, flat: "FlatParameter") -> None:
        """Begin to add up the ranks' gradients. A rank that has none adds zeros. `arrive` waits."""
        self.arrive(flat)
        if self.whole is None:
            self.add(flat, [None] * len(flat.slots))
        assert self.whole is not None
        whole, self.whole, self.kept = self.whole, None, False
        self._end = reduce_scatter(whole.to(flat.kind.reduce_dtype), flat.group)

    def arrive(self, flat: "FlatParameter") -> None:
        """Wait until this rank's shard of the mean is there, if it is on its way."""
        if self._end is None:
            return
        end, self._end = self._end, None
        mean = end()
        if len(flat.kind.groups) > 1:
            dist.all_reduce(mean, group=flat.kind.groups[1])
        mean = mean.to(flat.shard)
        self.total = mean if self.total is None else self.total.add_(mean)

    def deliver(self, flat: "FlatParameter", anywhere: list[bool]) -> None:
        """To the `.grad` of each piece whose parameter has a gradient `anywhere`."""
        total, self.total = self.total, None
        self.touched.clear()
        for slot, there in zip(flat.slots, anywhere, strict=True):
            own = slot.piece.own
            if total is None or not there or not own.requires_grad:
                continue
            gradient = total[slot.piece.place].view_as(own).as_subclass(ShardGradient)
            if own.grad is None:
                own.grad = gradient
            else:
                own.grad += gradient

    # Without synchronization the gradient stays, flat and whole. So that `zero_grad` of any
    # optimizer finds something to forget, each piece has its part of it for a `.grad`.

    def leave(self, flat: "FlatParameter") -> None:
        """Keep the gradient for a later pass."""
        if self.whole is None:
            return
        part = flat.own_shard(self.whole)
        for number, slot in enumerate(flat.slots):
            own, before = slot.piece.own, slot.piece.own.grad
            note = None
            if number in self.touched:
                copy = part[slot.piece.place].view_as(own).to(own.device, copy=True)
                own.grad = copy.as_subclass(ShardGradient)
                note = own.grad, own.grad._version, before
            self._notes.append(note)

    def resume(self, flat: "FlatParameter") -> None:
        """Forget what has been zeroed since; the rest will be added to. Raises RuntimeError for
        what has been changed: it is a part of what there is, and the other parts have not been."""
        if not self._notes:
            return
        assert self.whole is not None
        notes, self._notes = self._notes, []
        for number, (note, view) in enumerate(zip(notes, flat.views(self.whole), strict=True)):
            if note is None:
                continue
            slot, (left, version, before) = flat.slots[number], note
            own = slot.piece.own
            if own.grad is left and left._version == version:
                own.grad = before
            elif own.grad is None or (own.grad is left and not left.any()):
                view.zero_()
                self.touched.discard(number)
            else:
                raise RuntimeError(f"the .grad of {slot.names[0]} {CHANGED}")

    def reset(self) -> None:
        """Forget a pass that has failed on its way."""
        self.__init__()  # type: ignore[misc]
