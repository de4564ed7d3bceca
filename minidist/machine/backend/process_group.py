# torch's stubs declare overloads, of which it calls one.
# mypy: disable-error-code="override,assignment"
"""The backend "shm": the calls of `torch.distributed`, for tensors on the CPU.

torch calls these methods, with lists of tensors and an object of options. Each checks what this
rank can see, and then gives `_collective` its row of a table: what the call is named (all ranks
must make the same), which tensors it fills from which, by which of the `collectives`, and what that
costs on an emulated link. `_collective` makes it a task of the engine.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minidist.common.uncompiled import uncompiled
from minidist.instruments.link import Link, steps
from minidist.instruments.measure import record
from minidist.machine.backend import collectives
from minidist.machine.backend.engine import Engine
from minidist.machine.backend.group import Caller, Members, at_line
from minidist.machine.backend.point_to_point import Post
from minidist.machine.backend.queues import Operation, Task
from minidist.machine.backend.tensors import (
    Tensors,
    describe,
    flatten,
    on_cpu,
    one_each,
    put_back,
    reduction,
    splits,
    together,
)

# Packages that lie between the user's line and a call; torch deprecates by typing_extensions.
OURS = ("torch", "minidist", "typing_extensions", "contextlib")

SHORT = 1 << 19  # bytes up to which a call takes the first steps itself, and wakes no thread

# The options of a call that is made without any.
ALL_REDUCE, REDUCE = dist.AllreduceOptions(), dist.ReduceOptions()
BROADCAST, REDUCE_SCATTER = dist.BroadcastOptions(), dist.ReduceScatterOptions()
GATHER, SCATTER = dist.GatherOptions(), dist.ScatterOptions()

Way = Callable[[list[steps.Step]], list[steps.Step]]  # as it is, or `steps.back`


class Cost(NamedTuple):
    """What a collective of `size` bytes costs on an emulated link: `steps()` are its messages."""

    size: int
    steps: Callable[[], Sequence[steps.Step]]


class Purpose(threading.local):
    """What the collectives are for that a thread begins now: see `backend.purpose`."""

    what = ""


@uncompiled
class ShmProcessGroup(dist.ProcessGroup):
    """Ranks that share memory, and the thread of this rank that communicates. Made by
    `dist.init_process_group("shm")`, by `dist.new_group(backend="shm")`, and for meshes of such
    groups.

    Limits:
    - It takes dense tensors on the CPU; none that is expanded, to receive into; complex numbers
      without a pending `conj()`.
    - A rank makes what a callback of a future calls when it runs the callback, which is another
      moment on each rank: let one such chain be under way at a time, as torch's `powerSGD_hook`
      is with one bucket. In a callback, wait for calls (`Work.wait`), and for no other future.
    - Coalesced calls: only all_gather and reduce_scatter of single tensors.
    - A call that C++ alone holds has no future: that of torch's DDP, in a
      `join(divide_by_initial_world_size=False)`.
    - The timeout is the group's: `dist.barrier(timeout=...)` has none of its own.
    """

    def __init__(self, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)  # type: ignore[call-arg]
        ranks = self._global_ranks = list(options.global_ranks_in_group) or list(range(size))
        link, nodes = Link.here(), _nodes(ranks)
        self.members = Members(options.store, rank, size, options.timeout, link, ranks, nodes)
        self._engine = Engine(self.members.bell, self.members.explain, self.members.leave)
        self._post = Post(self.members)
        self._number = 0  # of calls
        self._name = ""
        self.purpose = Purpose()

    # ---- how a call becomes a task ---------------------------------------------------------

    def _collective(
        self,
        what: str,
        outs: Tensors,
        ins: Tensors,
        collective: Callable[[Members, Tensors, Tensors], Operation],
        opts: Any,
        cost: Cost,
        result: Sequence[Any] | None = None,
    ) -> Task:
        """Begin a call. `collective` gets the outs and ins as (n,), and fills the outs. On an
        emulated link the call takes the time that it costs. `result`: the value of its future, if
        other than the outs."""
        take(what, [*outs, *ins])
        where, now = caller(), time.monotonic()
        what += f" for {self.purpose.what}" if self.purpose.what else ""

        def run() -> Operation:
            self.members.call(what, where, now)
            flats = list(map(flatten, outs))
            yield from collective(self.members, flats, list(map(flatten, ins)))
            for out, flat in zip(outs, flats, strict=True):
                put_back(out, flat)
            yield from self.members.travel(cost.steps)

        task = self._task(run(), what, where, outs if result is None else result)
        self._record(what, "collective", None, cost.size, task)
        awaited = not getattr(opts, "asyncOp", True)
        self._engine.submit("collectives", task, cost.size <= SHORT, awaited)
        return task

    def _task(self, operation: Operation, what: str, where: Caller, result: Sequence[Any]) -> Task:
        self._number += 1
        named, timeout = lambda: what + at_line(where), self.members.timeout
        return Task(operation, timeout, named, list(result), self._engine)

    def _record(
        self, what: str, kind: record.Kind, peer: int | None, nbytes: int, task: Task
    ) -> None:
        """Record a call that torch makes in C++; a call in Python is recorded where it is made."""
        if not record.active() or record.within_call():
            return
        event = record.begin(what.partition("(")[0], kind, peer, nbytes, self._global_ranks)

        def end(_: object) -> None:
            if task.source >= 0:
                event.peer = self._global_ranks[task.source]
            record.finish([event])

        task.get_future().add_done_callback(end)

    # What calls cost on an emulated link.

    def _ring(self, nbytes: int, rounds: int = 1) -> Cost:
        return Cost(nbytes, lambda: steps.ring(self.size(), nbytes, rounds))

    def _tree(self, nbytes: int, root: int, way: Way = list) -> Cost:
        return Cost(nbytes, lambda: way(steps.tree(self.size(), nbytes, root)))

    def _flat(self, nbytes: int, root: int, way: Way = list) -> Cost:
        return Cost(nbytes, lambda: way(steps.flat(self.size(), nbytes, root)))

    # ---- collectives -----------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = ALL_REDUCE) -> Task:
        (x,), by = tensors, reduction("all_reduce", opts.reduceOp, self.size())
        what, cost = f"all_reduce({describe(x)}, op={by.name})", self._ring(x.nbytes, 2)
        how = partial(collectives.all_reduce, reduction=by)
        return self._collective(what, [x], [], how, opts, cost)

    def reduce(self, tensors: Tensors, opts: Any = REDUCE) -> Task:
        (x,), root = tensors, opts.rootRank
        by = reduction("reduce", opts.reduceOp, self.size())
        total = x if root == self.rank() else x.clone()
        what = f"reduce({describe(x)}, dst={root}, op={by.name})"
        how = partial(collectives.all_reduce, reduction=by)
        return self._collective(
            what, [total], [], how, opts, self._tree(x.nbytes, root, steps.back)
        )

    def broadcast(self, tensors: Tensors, opts: Any = BROADCAST) -> Task:
        (x,), root = tensors, opts.rootRank
        what, cost = f"broadcast({describe(x)}, src={root})", self._tree(x.nbytes, root)
        how = partial(collectives.broadcast, root=root)
        return self._collective(what, [x], [], how, opts, cost)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Task:
        (outs,), (x,) = outputs, inputs
        one_each("all_gather", outs, x, self.size())
        what, cost = f"all_gather({describe(x)})", self._ring(self.size() * x.nbytes)
        return self._collective(what, outs, [x], collectives.all_gather, opts, cost, outputs)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = GATHER) -> Task:
        (x,), root = inputs, opts.rootRank
        outs: Tensors = outputs[0] if root == self.rank() else []
        if root == self.rank():
            one_each("gather", outs, x, self.size())
        what = f"gather({describe(x)}, dst={root})"
        cost = self._flat(self.size() * x.nbytes, root, steps.back)
        return self._collective(what, outs, [x], collectives.all_gather, opts, cost, outputs)

    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Task:
        return self.all_gather_single_coalesced([output], [x], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Task:
        """Several tensors of one dtype, in one message."""
        for output, x in zip(outputs, inputs, strict=True):
            together("all_gather_single", output, x, self.size())
        what, cost = f"all_gather_single({describe(*inputs)})", self._ring(nbytes_of(outputs))
        return self._collective(what, outputs, inputs, collectives.all_gather_single, opts, cost)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = SCATTER) -> Task:
        (x,), root = outputs, opts.rootRank
        parts: Tensors = inputs[0] if root == self.rank() else []
        if root == self.rank():
            one_each("scatter", parts, x, self.size())
        what, cost = f"scatter({describe(x)}, src={root})", self._flat(self.size() * x.nbytes, root)
        how = partial(collectives.scatter, root=root)
        return self._collective(what, [x], parts, how, opts, cost)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = REDUCE_SCATTER
    ) -> Task:
        (x,), (parts,) = outputs, inputs
        one_each("reduce_scatter", parts, x, self.size())
        return self._reduce_scatter("reduce_scatter", x, parts, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, x: torch.Tensor, opts: Any = REDUCE_SCATTER
    ) -> Task:
        together("reduce_scatter_single", x, output, self.size())
        on_cpu("reduce_scatter_single", [x])
        parts = list(flatten(x).view(self.size(), -1))
        return self._reduce_scatter("reduce_scatter_single", output, parts, opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = REDUCE_SCATTER
    ) -> Task:
        """What torch's functional collectives call, with one tensor."""
        (output,), (x,) = outputs, inputs
        return self.reduce_scatter_single(output, x, opts)

    def _reduce_scatter(self, name: str, x: torch.Tensor, parts: Tensors, opts: Any) -> Task:
        by, cost = reduction(name, opts.reduceOp, self.size()), self._ring(self.size() * x.nbytes)
        what, how = f"{name}({describe(x)}, op={by.name})", collectives.reduce_scatter
        return self._collective(what, [x], parts, partial(how, reduction=by), opts, cost)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Task:
        for tensors in (outputs, inputs):
            if len(tensors) != self.size() or {x.dtype for x in tensors} != {inputs[0].dtype}:
                raise ValueError(
                    f"all_to_all takes {self.size()} tensors of one dtype, one for each rank, "
                    f"not {describe(*tensors)}"
                )
        return self._all_to_all("all_to_all", outputs, inputs, lambda xs, _: xs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Task:
        if output.dtype != x.dtype:
            raise ValueError(f"all_to_all_single: {describe(output)} from {describe(x)}")
        given = splits("all_to_all_single", x, input_splits, self.size())
        expected = splits("all_to_all_single", output, output_splits, self.size())

        def cut(xs: Tensors, is_output: bool) -> Tensors:
            return xs[0].split(expected if is_output else given)

        return self._all_to_all("all_to_all_single", [output], [x], cut, opts)

    def _all_to_all(
        self,
        name: str,
        outputs: Tensors,
        inputs: Tensors,
        cut: Callable[[Tensors, bool], Tensors],
        opts: Any,
    ) -> Task:
        """`cut(tensors, are_outputs)`: flat ones, one for each rank."""
        sizes: list[list[int]] = []  # from each rank to each, in bytes, once they are known

        def exchange(members: Members, outs: Tensors, ins: Tensors) -> Operation:
            found = yield from collectives.all_to_all(members, cut(outs, True), cut(ins, False))
            sizes.extend(found)

        what = f"{name}(dtype={inputs[0].dtype})"  # shapes may differ
        cost = Cost(nbytes_of(inputs), lambda: steps.pairwise(sizes))
        return self._collective(what, outputs, inputs, exchange, opts, cost)

    def barrier(self, opts: Any = None) -> Task:
        cost = Cost(0, lambda: steps.dissemination(self.size()))
        return self._collective("barrier()", [], [], lambda *_: self.members.agree(), opts, cost)

    # The C++ of torch 2.13 calls these by their older names.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    # ---- messages --------------------------------------------------------------------------

    def send(self, tensors: Tensors, to: int, tag: int) -> Task:
        (x,) = tensors
        take("send", tensors)
        operation = self._post.send(flatten(x), to, tag, time.monotonic())
        task = self._task(operation, f"send({describe(x)}, dst={to}, tag={tag})", caller(), [])
        self._record("send", "sent", self._global_ranks[to], x.nbytes, task)
        self._engine.submit(("to", to), task, short=True)
        return task

    def recv(self, tensors: Tensors, source: int, tag: int) -> Task:
        return self._receive(tensors, [source], tag, source)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Task:
        others = [rank for rank in range(self.size()) if rank != self.rank()]
        return self._receive(tensors, others, tag, None)

    def _receive(self, tensors: Tensors, sources: list[int], tag: int, src: int | None) -> Task:
        (x,) = tensors
        take("recv", tensors)

        def run() -> Operation:
            flat = flatten(x)
            task.source = yield from self._post.receive(flat, sources, tag)
            put_back(x, flat)

        task = self._task(run(), f"recv({describe(x)}, src={src}, tag={tag})", caller(), [x])
        self._record("recv", "received", None, x.nbytes, task)
        self._engine.submit(object(), task, short=True)  # none waits behind another
        return task

    # ---- the group itself ------------------------------------------------------------------

    # Torch's own two are slower by more than a microsecond.

    def rank(self) -> int:
        return self.members.rank

    def size(self) -> int:
        return self.members.size

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
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]  # torch's functions for checkpoints ask

    def _get_backend(self, device: torch.device) -> "ShmProcessGroup":
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._number

    def shutdown(self) -> None:
        self._engine.close()


def take(what: str, tensors: Tensors) -> None:
    """A call takes these tensors. Raises ValueError if that cannot be."""
    on_cpu(what, tensors)
    record.hand_over(tensors)


def nbytes_of(tensors: Tensors) -> int:
    return sum(x.nbytes for x in tensors)


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
