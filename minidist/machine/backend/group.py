# torch's stubs declare overloads, of which it calls one.
# mypy: disable-error-code="override,assignment"
"""A process group of the backend "shm": how calls become tasks. See `process_group` for the
calls."""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minidist.common.uncompiled import uncompiled
from minidist.instruments.link import Link
from minidist.instruments.link.steps import Step
from minidist.instruments.measure import record
from minidist.machine.backend.engine import Engine
from minidist.machine.backend.handle import Handle, Reservation
from minidist.machine.backend.members import Caller, Members, at_line
from minidist.machine.backend.point_to_point import Post
from minidist.machine.backend.queues import Operation, Task
from minidist.machine.backend.tensors import Tensors, dense, describe, flatten, put_back, writable

# Packages that lie between the user's line and a call; torch deprecates by typing_extensions.
OURS = ("torch", "minidist", "typing_extensions", "contextlib")

Flats = Sequence[torch.Tensor]  # (n,) each

SHORT = 1 << 19  # bytes up to which a call takes the first steps itself, and wakes no thread


class Cost(NamedTuple):
    """What a collective of `size` bytes costs on an emulated link: `steps()` are its messages."""

    size: int
    steps: Callable[[], Sequence[Step]]


@uncompiled
class Group(dist.ProcessGroup):
    """The ranks of a group on one machine, and the thread of this rank that communicates."""

    def __init__(self, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)  # type: ignore[call-arg]
        ranks = self._global_ranks = list(options.global_ranks_in_group) or list(range(size))
        link, nodes = Link.here(), _nodes(ranks)
        self.members = Members(options.store, rank, size, options.timeout, link, ranks, nodes)
        self._engine = Engine(self.members.bell, self.members.explain, self.members.leave)
        self._post = Post(self.members)
        self._number = 0  # of calls
        # Keep the last eight small handles alive: torch's DDP (in `join`) drops the Python object
        # while C++ still uses it.
        self._held = deque[Handle](maxlen=8)
        self._name = ""
        self.purpose = Purpose()

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]  # torch's functions for checkpoints ask

    def _get_backend(self, device: torch.device) -> "Group":
        return self

    def _take(self, what: str, tensors: Tensors, outputs: Tensors = ()) -> None:
        """A call takes these tensors, and fills those. Raises ValueError if that cannot be."""
        dense(what, [*tensors, *outputs])
        writable(what, outputs)
        record.hand_over([*tensors, *outputs])

    def _collective(
        self,
        what: str,
        groups: Iterable[tuple[Tensors, Tensors]],
        collective: Callable[[Flats, Flats], Operation],
        result: Sequence[Any],
        opts: Any,
        cost: Cost,
        receives: bool = True,
    ) -> Handle:
        """Begin a call. `collective` gets the tensors of each group (outs, ins), one group after
        another, as (n,), and fills the outs, if this rank `receives` anything. On an emulated link
        the call takes the time that it costs."""
        self._number += 1
        where, now = caller(), time.monotonic()
        what += f" for {self.purpose.what}" if self.purpose.what else ""

        def run() -> Operation:
            self.members.call(what, where, now)
            for outs, ins in groups:
                flats = list(map(flatten, outs))
                yield from collective(flats, list(map(flatten, ins)))
                if receives:
                    for out, flat in zip(outs, flats, strict=True):
                        put_back(out, flat)
            yield from self.members.travel(cost.steps)

        inner = Reservation.current(self._engine)  # this is a callback
        queue, whole = ("collectives", run()) if inner is None else (inner, inner.take(run()))
        task = Task(whole, self._seconds(opts), lambda: what + at_line(where), list(result))
        handle = Handle(task, self._engine)
        self._record(what, "collective", None, cost.size, handle)
        handle.reserve = partial(Reservation, self._engine, queue)
        if cost.size <= 8:
            self._held.append(handle)
        awaited = not getattr(opts, "asyncOp", True)
        self._engine.submit(queue, task, short=cost.size <= SHORT, awaited=awaited)
        return handle

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
        self._take("send", tensors)
        where, operation = caller(), self._post.send(flatten(x), to, tag, time.monotonic())
        what = f"send({describe(x)}, dst={to}, tag={tag})"  # now: the task keeps no tensor
        task = Task(operation, self.members.timeout, lambda: what + at_line(where), [])
        handle = Handle(task, self._engine)
        self._record("send", "sent", self._global_ranks[to], x.nbytes, handle)
        return self._message(("to", to), handle)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Handle:
        return self._receive(tensors, [source], tag, source)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Handle:
        others = [rank for rank in range(self.size()) if rank != self.rank()]
        if not others:
            raise ValueError("recv: there is no other rank in this group to receive from")
        return self._receive(tensors, others, tag, None)

    def _receive(self, tensors: Tensors, sources: list[int], tag: int, src: int | None) -> Handle:
        (x,) = tensors
        self._take("recv", [], tensors)
        where, what = caller(), f"recv({describe(x)}, src={src}, tag={tag})"

        def run() -> Operation:
            flat = flatten(x)
            handle.source = yield from self._post.receive(flat, sources, tag)
            put_back(x, flat)

        task = Task(run(), self.members.timeout, lambda: what + at_line(where), [x])
        handle = Handle(task, self._engine)
        self._record("recv", "received", None, x.nbytes, handle)
        return self._message(object(), handle)  # none waits behind another

    def _message(self, lane: Hashable, handle: Handle) -> Handle:
        self._number += 1
        self._engine.submit(lane, handle.task, short=True)
        return handle

    # ---- the group itself ------------------------------------------------------------------

    # Torch's own two are slower by more than a microsecond.

    def rank(self) -> int:
        return self.members.rank

    def size(self) -> int:
        return self.members.size

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

    def _get_sequence_number_for_group(self) -> int:
        return self._number

    def shutdown(self) -> None:
        self._engine.close()

    def abort(self) -> None:
        self._engine.close(RuntimeError("the process group has been aborted"))


class Purpose(threading.local):
    """What the collectives are for that a thread begins now: see `backend.purpose`."""

    what = ""


def _nodes(ranks: Sequence[int]) -> list[int]:
    """The node of each of these ranks, by torchrun's variables."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or max(ranks) + 1
    return [rank // per_node for rank in ranks]


def caller() -> Caller:
    """The line of the user's that made this call: the innermost outside torch and minidist."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in OURS:
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None
