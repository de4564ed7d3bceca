# torch's stubs declare overloads, of which it calls one.
# mypy: disable-error-code="override,assignment"
"""A process group of the backend "shm": how calls become operations. What the calls are is said in
`process_group`."""

import os
import sys
from collections import deque
from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minidist.backend.checks import dense, tell
from minidist.backend.engine import Engine, Operation
from minidist.backend.handle import Handle
from minidist.backend.link import Egress, Link
from minidist.backend.members import Members
from minidist.backend.messages import Post
from minidist.measure import record

Tensors = Sequence[torch.Tensor]

# Between a call and the caller's line; torch deprecates by a function of typing_extensions.
OURS = ("torch", "minidist", "typing_extensions", "contextlib")

SHORT = 1 << 19  # bytes of a vector for which no thread is woken, if that can be
EGRESS = Egress()  # of this rank: all its groups share it, as they would share a cable


class Cost(NamedTuple):
    """Of a collective for a vector of `size` bytes: so many messages, one after the other, of so
    many bytes together."""

    size: int
    messages: int
    nbytes: float


class Group(dist.ProcessGroup):
    """The ranks of a group on one machine, and the thread of this rank that communicates."""

    def __init__(self, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)  # type: ignore[call-arg]
        link, nodes = Link.here(), _nodes(options.global_ranks_in_group, size)
        self.members = Members(options.store, rank, size, options.timeout, link, nodes, EGRESS)
        self._global_ranks = list(options.global_ranks_in_group) or list(range(size))
        self._engine = Engine(self.members.bell, self.members.explain, self.members.leave)
        self._post = Post(self.members)
        self._number = 0  # of calls
        # Torch's DDP holds the handle of a single number, by which ranks tell each other in `join`
        # that they have not finished, in C++ alone; there it would end with its Python object.
        self._held = deque[Handle](maxlen=8)
        self._name = self._description = ""

    def _take(self, what: str, tensors: Tensors) -> None:
        """These belong to a call, which is wrong if they are not dense."""
        dense(what, tensors)
        record.hand_over(tensors)

    def _collective(
        self, what: str, operation: Operation, result: list[Any], opts: Any, cost: Cost
    ) -> Handle:
        """Begin a collective, which takes on an emulated link what it costs."""
        self._number += 1
        where = caller()

        def run() -> Operation:
            self.members.call(what, where, cost.messages, cost.nbytes)
            yield from operation
            yield from self.members.travel()

        handle = Handle(result, f"{what}, {where}" if where else what)
        self._record(what, "collective", None, cost.size, handle)
        if cost.size <= 8:
            self._held.append(handle)
        seconds, short = self._seconds(opts), cost.size <= SHORT
        return self._engine.submit("collectives", run(), handle, seconds, short)

    def _ring(self, nbytes: int, rounds: int = 1) -> Cost:
        """What a ring costs for a vector of so many bytes."""
        steps = rounds * (self.size() - 1)
        return Cost(nbytes, steps, steps / self.size() * nbytes)

    def _tree(self, nbytes: int) -> Cost:
        """What a binomial tree costs."""
        steps = (self.size() - 1).bit_length()
        return Cost(nbytes, steps, steps * nbytes)

    def _record(
        self, what: str, kind: record.Kind, peer: int | None, nbytes: int, handle: Handle
    ) -> None:
        """Record a call that torch makes in C++; a call in Python is recorded where it is made."""
        if not record.active() or record.within_call():
            return
        event = record.begin(what.partition("(")[0], kind, peer, nbytes, self._global_ranks)

        def end(_: object) -> None:
            if handle.source >= 0:
                event.peer = self._global_ranks[handle.source]
            record.finish([event])

        handle.get_future().add_done_callback(end)

    # ---- messages --------------------------------------------------------------------------

    def send(self, tensors: Tensors, to: int, tag: int) -> Handle:
        (x,) = tensors
        what = f"send({tell(x)}, dst={to}, tag={tag})"
        self._take(what, tensors)
        operation = self._post.send(flatten(x), to, tag)
        handle = Handle([], what)
        self._record(what, "sent", self._global_ranks[to], x.nbytes, handle)
        return self._message(("to", to), operation, handle)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Handle:
        (x,) = tensors
        return self._receive(x, [source], tag, f"recv({tell(x)}, src={source}, tag={tag})")

    def recv_anysource(self, tensors: Tensors, tag: int) -> Handle:
        others = [rank for rank in range(self.size()) if rank != self.rank()]
        (x,) = tensors
        return self._receive(x, others, tag, f"recv({tell(x)}, src=None, tag={tag})")

    def _receive(self, x: torch.Tensor, sources: list[int], tag: int, what: str) -> Handle:
        self._take(what, [x])
        handle = Handle([x], what)
        self._record(what, "received", None, x.nbytes, handle)

        def run() -> Operation:
            flat = flatten(x)
            handle.source = yield from self._post.receive(flat, sources, tag)
            put_back(x, flat)

        return self._message(handle, run(), handle)

    def _message(self, lane: Hashable, operation: Operation, handle: Handle) -> Handle:
        self._number += 1
        if where := caller():
            handle.what += f", {where}"
        return self._engine.submit(lane, operation, handle, self.members.timeout, short=True)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """(numel,), uninitialized, in memory that the group shares."""
        return self.members.arena.empty(numel, dtype)

    # ---- the group itself ------------------------------------------------------------------

    def _seconds(self, opts: Any) -> float:
        timeout = getattr(opts, "timeout", None)
        given = timeout.total_seconds() if timeout is not None else 0
        return given if given > 0 else self.members.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self.members.timeout = timeout.total_seconds()

    def getBackendName(self) -> str:  # noqa: N802
        return "shm"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def _get_sequence_number_for_group(self) -> int:
        return self._number

    def shutdown(self) -> None:
        self._engine.close()

    def abort(self) -> None:
        self._engine.close(RuntimeError("the process group has been aborted"))


def _nodes(ranks: Sequence[int], size: int) -> list[int]:
    """The node of each rank of the group, as torchrun's variables tell it."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or max(size, 1)
    return [rank // per_node for rank in (ranks or range(size))]


def flatten(x: torch.Tensor) -> torch.Tensor:
    """(*,) to (n,): a view where possible."""
    return x.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def put_back(x: torch.Tensor, flat: torch.Tensor) -> None:
    """Write (n,) back where it came from, if it is a copy."""
    if x.data_ptr() != flat.data_ptr():
        x.detach().copy_(flat.view(x.shape))


def caller() -> str:
    """The line of the user's that made this call: the innermost outside torch and minidist."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in OURS:
            # As Python tells it: for an editor, and for `runtime`, which knows cells by number.
            return f'File "{frame.f_code.co_filename}", line {frame.f_lineno}'
        frame = frame.f_back
    return ""
