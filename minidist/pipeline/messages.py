"""What stages send each other during one step (lesson 5).

A wire leads from each stage to the next: activations go along it, gradients come back. What they
look like is told by a header of 128 bytes, ahead of the first activation of each step, so that the
receiver can make room for them. All further micro-batches must be alike, but for their rows.

No message waits for its other end in its own place: a send is on its way while its rank goes on,
and a receive is waited for when its message is needed. Between two ranks messages keep their order.
"""

from collections import defaultdict, deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from minidist.collectives.peers import TAG, Peers, as_bytes
from minidist.pipeline.instructions import Instruction, ReceiveGradient, SendActivation, other_end

HEADER = 16  # int64
ON_THEIR_WAY = 2  # messages to one rank: as long as they travel, they take memory
_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


def rows_of(total: int, microbatches: int) -> list[int]:
    """The rows of each micro-batch, as even as can be: the first ones take what is left over."""
    small, larger = divmod(total, microbatches)
    return [small + (i < larger) for i in range(microbatches)]


@dataclass(frozen=True)
class Layout:
    """What an activation of a micro-batch looks like: (repeat * its rows, *rest) of a dtype."""

    rows: int  # of the whole batch
    repeat: int
    rest: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: torch.Tensor, rows: int, total: int) -> "Layout":
        """The layout of outputs `x` for `rows` rows of the batch's `total`. Raises ValueError and
        TypeError where outputs cannot be sent."""
        if not x.is_floating_point():
            raise TypeError(f"between stages goes a floating dtype, not {_name(x.dtype)}")
        if not 1 <= x.ndim <= HEADER - 4 or x.shape[0] % rows:
            raise ValueError(
                f"between stages the first dimension is the micro-batch's rows ({rows}), or a "
                f"multiple of them; this stage gives shape {tuple(x.shape)}"
            )
        return cls(total, x.shape[0] // rows, tuple(x.shape[1:]), x.dtype)

    def shape(self, rows: int) -> tuple[int, ...]:
        return self.repeat * rows, *self.rest

    def encode(self) -> list[int]:
        return [self.rows, self.repeat, _DTYPES.index(self.dtype), len(self.rest), *self.rest]

    @classmethod
    def decode(cls, numbers: list[int]) -> "Layout":
        rows, repeat, dtype, length, *rest = numbers
        return cls(rows, repeat, tuple(rest[:length]), _DTYPES[dtype])


class Messages:
    """This rank's end of the wires, for one step."""

    def __init__(self, peers: Peers, microbatches: int, device: torch.device) -> None:
        self._peers, self._microbatches, self._device = peers, microbatches, device
        # By wire, that is, by the stage that it leads from. None: it carries nothing in this step.
        self._layouts: dict[int, Layout | None] = {}
        self._told: set[int] = set()  # wires whose header we have sent
        # By rank: the message that cannot come in yet, and the header that comes before it.
        self._held_up: dict[int, tuple[Instruction, torch.Tensor, dist.Work | None]] = {}
        self._coming: dict[Instruction, tuple[torch.Tensor, dist.Work | None] | None] = {}
        self._leaving: dict[int, deque[tuple[torch.Tensor, dist.Work]]] = defaultdict(deque)

    # ---- outputs ---------------------------------------------------------------------------

    def declare(self, stage: int, microbatch: int, x: torch.Tensor, total: int) -> None:
        """The stage has made `x` of a micro-batch. Raises unless it can be sent."""
        layout = Layout.of(x, rows_of(total, self._microbatches)[microbatch], total)
        first = self._layouts.setdefault(stage, layout)
        if layout != first:
            assert first is not None
            expected = first.shape(rows_of(total, self._microbatches)[microbatch])
            raise ValueError(
                f"this stage gives shape {tuple(x.shape)}, {_name(x.dtype)}; after what it gave "
                f"for other micro-batches of this step it must be {expected}, {_name(first.dtype)}"
            )

    def layout(self, wire: int) -> Layout:
        """What goes along a wire from which an activation has come."""
        layout = self._layouts[wire]
        assert layout is not None
        return layout

    def send(self, send: Instruction, x: torch.Tensor | None) -> None:
        """Send `x`. None: the rank has failed, and sends zeros, so that no other waits for ever."""
        wire, to = _wire(send), other_end(send).stage % self._peers.size
        layout = self._layouts.setdefault(wire, None)
        if isinstance(send, SendActivation) and wire not in self._told:
            self._told.add(wire)
            numbers = layout.encode() if layout else [0]
            numbers += [0] * (HEADER - len(numbers))
            self._isend(torch.tensor(numbers, device=self._peers.device), to)
        if layout is not None:
            self._isend(self._room(layout, send).zero_() if x is None else x.contiguous(), to)

    def _isend(self, x: torch.Tensor, to: int) -> None:
        if x.numel():
            leaving, group = self._leaving[to], self._peers.group
            work = dist.isend(as_bytes(x.view(-1)), group=group, group_dst=to, tag=TAG)
            assert work is not None  # which it is for ranks outside the group only
            leaving.append((x, work))
            if len(leaving) > ON_THEIR_WAY:
                leaving.popleft()[1].wait()

    # ---- inputs ----------------------------------------------------------------------------

    def expect(self, receive: Instruction) -> None:
        """Let the message come in. If its header has to come first, then by the time that the next
        message of the same rank is expected, or this one is taken."""
        peer = self._source(receive)
        self._learn(peer)
        if _wire(receive) in self._layouts:
            self._receive(receive, peer)
        else:
            header = torch.zeros(HEADER, dtype=torch.int64, device=self._peers.device)
            self._held_up[peer] = receive, header, self._irecv(header, peer)

    def take(self, receive: Instruction) -> torch.Tensor | None:
        """Wait for a message that is expected. None: its wire carries nothing in this step."""
        if receive not in self._coming:
            self._learn(self._source(receive))
        coming = self._coming.pop(receive)
        if coming is None:
            return None
        x, work = coming
        if work is not None:
            work.wait()
        return x

    def _learn(self, peer: int) -> None:
        """Wait for the header that is to come from a rank, if any."""
        if peer in self._held_up:
            receive, header, work = self._held_up.pop(peer)
            assert work is not None
            work.wait()
            numbers = header.tolist()
            self._layouts[_wire(receive)] = Layout.decode(numbers) if numbers[0] else None
            self._receive(receive, peer)

    def _receive(self, receive: Instruction, peer: int) -> None:
        layout = self._layouts[_wire(receive)]
        if layout is None:
            self._coming[receive] = None
        else:
            x = self._room(layout, receive)
            self._coming[receive] = x, self._irecv(x, peer) if x.numel() else None

    def _irecv(self, x: torch.Tensor, source: int) -> dist.Work | None:
        group = self._peers.group
        return dist.irecv(as_bytes(x.view(-1)), group=group, group_src=source, tag=TAG)

    def _source(self, receive: Instruction) -> int:
        return other_end(receive).stage % self._peers.size

    def _room(self, layout: Layout, message: Instruction) -> torch.Tensor:
        """An uninitialized tensor for a message."""
        rows = rows_of(layout.rows, self._microbatches)[message.microbatch]
        return torch.empty(layout.shape(rows), dtype=layout.dtype, device=self._device)

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for leaving in self._leaving.values():
            while leaving:
                leaving.popleft()[1].wait()


def _wire(message: Instruction) -> int:
    leads_on = isinstance(message, (SendActivation, ReceiveGradient))
    return message.stage if leads_on else message.stage - 1


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
