"""Calls of `torch.distributed`, seen from outside (lesson: collectives): they feed `record`.

While somebody observes, the functions below are replaced in `torch.distributed` by wrappers that
note the call and pass it on. Calls as `dist.all_reduce(...)` are seen, from any thread; a function
that was imported by name beforehand is not, nor are calls made in C++, such as those of torch's
own DistributedDataParallel: unless the backend is "shm", which records them itself. A call that
raises counts, and a message that was received from any source has no peer.
"""

import contextlib
import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils._pytree import tree_leaves

from minidist.instruments.measure import record
from minidist.instruments.measure.record import Event, Kind

# function: (kind, argument that names the other rank, the same as a rank within the group)
_MESSAGES: dict[str, tuple[Kind, str, str]] = {
    "send": ("sent", "dst", "group_dst"),
    "isend": ("sent", "dst", "group_dst"),
    "recv": ("received", "src", "group_src"),
    "irecv": ("received", "src", "group_src"),
}

# function: the argument that holds the whole vector, whose size is n in the α-β costs. Of gather
# and scatter every rank shows one piece only: their n is the piece times the number of ranks.
_COLLECTIVES: dict[str, str | None] = {
    "broadcast": "tensor",
    "reduce": "tensor",
    "all_reduce": "tensor",
    "scatter": "tensor",
    "gather": "tensor",
    "all_gather": "tensor_list",
    "all_gather_into_tensor": "output_tensor",
    "all_gather_single": "output_tensor",
    "reduce_scatter": "input_list",
    "reduce_scatter_tensor": "input",
    "reduce_scatter_single": "input",
    "all_to_all": "input_tensor_list",
    "all_to_all_single": "input",
    "barrier": None,
}


class _Watched:
    """A function of `torch.distributed` that records its calls. Equal to the function itself,
    since torch compares: `P2POp` accepts an `op` that is in `[isend, irecv]`."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.name = name
        self.function = function
        self.signature = inspect.signature(function)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.function

    def __hash__(self) -> int:
        return hash(self.function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not record.active() or record.within_call():
            return self.function(*args, **kwargs)
        arguments = self.signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        events = _describe(self.name, arguments.arguments)
        with record.call():
            result = self.function(*args, **kwargs)
        record.hold(events)
        return _follow(result, events)


def _describe(name: str, arguments: dict[str, Any]) -> list[Event]:
    """Begin the events of a call: one; as many as its messages for a batch; none if the rank is
    not in the group."""
    if name == "batch_isend_irecv":
        batch = arguments["p2p_op_list"]
        return [_message(op.op.__name__, op.tensor, op.peer, op.group) for op in batch]
    group = arguments.get("group")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return []
    if name in _MESSAGES:
        _, peer_name, group_peer_name = _MESSAGES[name]
        peer, group_peer = arguments[peer_name], arguments[group_peer_name]
        if peer is None and group_peer is not None:
            peer = dist.get_process_group_ranks(group)[group_peer]
        return [_message(name, arguments["tensor"], peer, group)]
    vector = _COLLECTIVES[name]
    nbytes = _nbytes(arguments[vector]) if vector else 0
    if name in ("gather", "scatter"):
        nbytes *= dist.get_world_size(group)
    ranks = dist.get_process_group_ranks(group)
    return [record.begin(name, "collective", None, nbytes, ranks)]


def _message(name: str, tensor: object, peer: int | None, group: Any) -> Event:
    ranks = dist.get_process_group_ranks(group)
    return record.begin(name, _MESSAGES[name][0], peer, _nbytes(tensor), ranks)


def _nbytes(value: object) -> int:
    return sum(x.nbytes for x in tree_leaves(value) if isinstance(x, torch.Tensor))


def _follow(result: Any, events: list[Event]) -> Any:
    """End the events now if the call has ended; else put a handle around torch's own."""
    if isinstance(result, list):  # a batch: one handle for each message, or one for all of them
        each = [[event] for event in events] if len(result) == len(events) else [events]
        each += [[]] * (len(result) - len(each))
        return [_WatchedWork(work, own) for work, own in zip(result, each, strict=True)]
    if isinstance(result, dist.Work):
        with contextlib.suppress(RuntimeError):  # not every work of gloo has a future
            result.get_future().add_done_callback(lambda _: record.finish(events))
        return _WatchedWork(result, events)
    record.finish(events)
    return result


class _WatchedWork(dist.Work):
    """Torch's handle of an asynchronous call; its events end at the latest when `wait` returns."""

    def __init__(self, work: dist.Work, events: list[Event]) -> None:
        super().__init__()
        self._work = work
        self._events = events

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        since = time.perf_counter()
        result = self._work.wait(*args, **kwargs)
        record.hold(self._events, since)
        record.finish(self._events)
        return result

    def is_completed(self) -> bool:
        done = self._work.is_completed()
        if done:
            record.finish(self._events)
        return done


def _pass_on(name: str) -> Callable[..., Any]:
    def method(self: _WatchedWork, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._work, name)(*args, **kwargs)

    return method


for _name in dir(dist.Work):
    if not _name.startswith("__") and _name not in vars(_WatchedWork):
        setattr(_WatchedWork, _name, _pass_on(_name))


class TorchCalls:
    """The source: puts the wrappers in place, and the functions back exactly as they were."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # where, name, function, wrapper

    def attach(self) -> None:
        for name in (*_MESSAGES, *_COLLECTIVES, "batch_isend_irecv"):
            function = getattr(dist, name)
            watched = _Watched(name, function)
            self._replace(dist, name, watched)
            # torch's own functions call one another through this module: its object collectives
            # end in all_gather and the like. It compares isend and irecv by `is`: leave them.
            if getattr(c10d, name, None) is function and name not in ("isend", "irecv"):
                self._replace(c10d, name, watched)
        self._replace(dist.P2POp, "__init__", _bare_operation(dist.P2POp.__init__))

    def detach(self) -> None:
        for where, name, function, watched in reversed(self._replaced):
            if getattr(where, name) is watched:  # unless somebody else has replaced it since
                setattr(where, name, function)
        self._replaced.clear()

    def _replace(self, where: Any, name: str, watched: Any) -> None:
        self._replaced.append((where, name, getattr(where, name), watched))
        setattr(where, name, watched)


def _bare_operation(init: Callable[..., None]) -> Callable[..., None]:
    """A `P2POp.__init__` that stores torch's isend or irecv, not the wrapper: the object may
    outlive the observation."""

    @functools.wraps(init)
    def wrapper(self: Any, op: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        init(self, op.function if isinstance(op, _Watched) else op, *args, **kwargs)

    return wrapper
