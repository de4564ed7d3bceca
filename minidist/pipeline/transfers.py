"""What stages send each other (lesson 5).

An activation is a tensor, or tensors and plain values in tuples, lists and dicts. Who receives one
makes room for it before it comes, so it must know its *outline*: the structure, and of each tensor
the shape and dtype. In the first step with inputs of a new shape, an outline travels ahead of the
first activation of each size. From then on only tensors travel: those of an activation one after
another, and on the way back a gradient for each of them that needs one.

Each message begins at its place in the schedule's list, on both sides. So what `validate` finds out
from the lists is true of the messages, even where two ranks have one queue for both directions, as
with NCCL. A send is in flight while its rank goes on; a receive is waited for when its message is
needed.
"""

import pickle
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import TreeSpec, tree_flatten, tree_structure, tree_unflatten

from minidist.collectives.peers import TAG, Peers, as_bytes
from minidist.pipeline.batch import tensors_of
from minidist.pipeline.instructions import (
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    other_end,
)

IN_FLIGHT = 2  # messages to one rank: as long as they travel, they take memory
ONE_TENSOR = tree_structure((torch.empty(0), {}))  # outputs, and no keyword arguments
PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor of an activation looks like, and whether a gradient for it comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool

    def __repr__(self) -> str:
        words = f"shape {self.shape}, {str(self.dtype).removeprefix('torch.')}"
        without = self.dtype.is_floating_point and not self.gradient
        return words + (", without gradient" if without else "")

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Outline:
    """An activation without its numbers: each tensor is a `TensorSpec`."""

    leaves: list[Any]
    structure: TreeSpec

    @classmethod
    def of(cls, activation: Any) -> "Outline":
        """Raises TypeError if there is something in it that cannot travel."""
        leaves, structure = tree_flatten(activation)
        return cls([_spec(leaf) for leaf in leaves], structure)

    def __str__(self) -> str:
        outputs, kwargs = self.tree()
        return f"{outputs}" + (f" and {kwargs}" if kwargs else "")

    def tree(self) -> Any:
        return tree_unflatten(self.leaves, self.structure)

    def tensors(self) -> list[TensorSpec]:
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorSpec)]

    def gradients(self) -> list[TensorSpec]:
        return [spec for spec in self.tensors() if spec.gradient]

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The activation that these tensors make. Those that need a gradient are leaves of
        autograd's graph."""
        left = iter(tensors)
        leaves = [
            next(left).requires_grad_(leaf.gradient) if isinstance(leaf, TensorSpec) else leaf
            for leaf in self.leaves
        ]
        return tree_unflatten(leaves, self.structure)


def _spec(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    if isinstance(leaf, PLAIN):
        return leaf
    raise TypeError(
        "between stages travel tensors, numbers, strings and None, in tuples, lists and dicts; "
        f"this stage gives a {type(leaf).__name__}"
    )


Boundary = tuple[int, int]  # the stage before it, and the rows of a micro-batch


@dataclass
class Outlines:
    """The outlines that this rank knows, for inputs of one shape. None: the stage before the
    boundary has failed, and nothing crosses it in this step, in either direction."""

    known: dict[Boundary, Outline | None] = field(default_factory=dict)
    told: set[Boundary] = field(default_factory=set)  # to the rank of the next stage

    def forget(self) -> None:
        """The step has failed, and they may lack something. Every rank calls this."""
        self.known.clear()
        self.told.clear()


class Transfers:
    """This rank's messages of one step. rows: of each micro-batch."""

    def __init__(
        self, peers: Peers, outlines: Outlines, rows: Sequence[int], device: torch.device
    ) -> None:
        self._peers, self._outlines, self._rows, self._device = peers, outlines, rows, device
        self._coming: dict[Instruction, tuple[list[torch.Tensor], list[dist.Work]] | None] = {}
        self._leaving: dict[int, deque[tuple[list[torch.Tensor], list[dist.Work]]]]
        self._leaving = defaultdict(deque)

    def declare(self, send: Instruction, activation: tuple[Any, Any]) -> list[torch.Tensor]:
        """The tensors of an activation that is to be sent, cut off from autograd's graph. Raises
        ValueError if it is not like those of other micro-batches with as many rows."""
        y, kwargs = activation
        first = self._outlines.known.get(self._boundary(send))
        alone = isinstance(y, torch.Tensor) and not kwargs  # mostly, and faster
        if alone and first == Outline([_spec(y)], ONE_TENSOR):
            return [y.detach()]
        outline = Outline.of(activation)
        first = self._outlines.known.setdefault(self._boundary(send), outline)
        if outline != first:
            raise ValueError(
                f"this stage gives {outline}; after what it gave for other micro-batches it must "
                f"be {first}"
            )
        return [x.detach() for x in tensors_of(activation)]

    def send(self, send: Instruction, tensors: Sequence[torch.Tensor | None] | None) -> None:
        """Send an activation's tensors, or their gradients. None stands for zeros: for a tensor
        without a gradient, and for all of them if the rank has failed, so that no other waits for
        ever."""
        boundary, to = self._boundary(send), other_end(send).stage % self._peers.size
        outline = self._outlines.known.setdefault(boundary, None)
        onward, leaving = isinstance(send, SendActivation), []
        if onward and boundary not in self._outlines.told:
            self._outlines.told.add(boundary)
            leaving += self._told(outline)
        if outline is not None:
            specs = outline.tensors() if onward else outline.gradients()
            found = [None] * len(specs) if tensors is None else tensors
            for spec, x in zip(specs, found, strict=True):
                whole = spec.empty(self._device).zero_() if x is None else x.contiguous()
                leaving.append(whole)
        self._isend(leaving, to)

    def expect(self, receive: Instruction) -> None:
        """Let the message come in, and ahead of it its outline, if that is not known yet."""
        boundary, source = self._boundary(receive), other_end(receive).stage % self._peers.size
        known = self._outlines.known
        if boundary not in known:
            known[boundary] = self._hear(source)
        outline = known[boundary]
        if outline is None:
            self._coming[receive] = None
            return
        onward = isinstance(receive, ReceiveActivation)
        specs = outline.tensors() if onward else outline.gradients()
        tensors = [spec.empty(self._device) for spec in specs]
        self._coming[receive] = tensors, self._irecv(tensors, source)

    def take(self, receive: Instruction) -> Any:
        """Wait for a message that is expected: an activation, or a list of gradients. None: nothing
        crosses that boundary in this step."""
        coming = self._coming.pop(receive)
        if coming is None:
            return None
        tensors, works = coming
        _wait(works)
        if isinstance(receive, ReceiveGradient):
            return tensors
        outline = self._outlines.known[self._boundary(receive)]
        assert outline is not None
        return outline.filled(tensors)

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for leaving in self._leaving.values():
            while leaving:
                _wait(leaving.popleft()[1])

    def _told(self, outline: Outline | None) -> list[torch.Tensor]:
        """An outline as tensors: how many bytes, and these."""
        told = pickle.dumps(None if outline is None else (outline.tree(),))
        data = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        length = torch.tensor([len(data)])
        return [x.to(self._peers.device) for x in (length, data)]

    def _hear(self, source: int) -> Outline | None:
        length = torch.zeros(1, dtype=torch.int64, device=self._peers.device)
        _wait(self._irecv([length], source))
        data = torch.empty(int(length), dtype=torch.uint8, device=self._peers.device)
        _wait(self._irecv([data], source))
        told = pickle.loads(data.cpu().numpy().tobytes())
        return None if told is None else Outline(*tree_flatten(*told))

    def _isend(self, tensors: list[torch.Tensor], to: int) -> None:
        leaving, group = self._leaving[to], self._peers.group
        works: Any = [dist.isend(x, group=group, group_dst=to, tag=TAG) for x in _flat(tensors)]
        leaving.append((tensors, works))
        if len(leaving) > IN_FLIGHT:
            _wait(leaving.popleft()[1])

    def _irecv(self, tensors: list[torch.Tensor], source: int) -> list[dist.Work]:
        group, flat = self._peers.group, _flat(tensors)
        works: Any = [dist.irecv(x, group=group, group_src=source, tag=TAG) for x in flat]
        return works

    def _boundary(self, message: Instruction) -> Boundary:
        leads_on = isinstance(message, (SendActivation, ReceiveGradient))
        stage = message.stage if leads_on else message.stage - 1
        return stage, self._rows[message.microbatch]


def _flat(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Their bytes. An empty tensor does not travel."""
    return [as_bytes(x.view(-1)) for x in tensors if x.numel()]


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
