"""Ranks that call functions on each other, and how they part (lesson: beyond_gradients)."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import rpc

from minidist.common.groups import require_group


@dataclass
class RpcSession:
    """`together`: all ranks are there at the end, and leave it together."""

    together: bool = True


class _Process:
    """How many sessions this process has had. torch's context of RRefs belongs to the first one."""

    sessions = 0


def require_first_session(what: str) -> None:
    """Raise RuntimeError if this process has had another session before."""
    if _Process.sessions > 1:
        raise RuntimeError(
            f"{what} needs ranks that have had no RPC session before: torch's RRefs work in the "
            "first session of a process only. Start new ranks"
        )


def name_of(rank: int) -> str:
    """What a rank is called in remote calls."""
    return f"rank{rank}"


@contextmanager
def rpc_session(timeout: float = 30, threads: int = 16) -> Iterator[RpcSession]:
    """Let the ranks of the default group call each other by `torch.distributed.rpc`.

        with rpc_session():
            rpc.rpc_sync(name_of(1), torch.add, args=(x, 1))

    Every rank enters, and all that it is called for must be there before. At the end a rank waits
    until all others have come there; not after an exception, nor where `together` was set to False.
    A call that has no answer after `timeout` seconds fails. `threads` serve calls of others.

    They find each other by the store of the default group. Raises RuntimeError without a process
    group, or where RPC runs already. Lesson: beyond_gradients.
    """
    require_group(None, "rpc_session")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # By TCP (a private argument): torch's transport by shared memory polls on every rank all the
    # time. On two cores, four ranks that train then waited up to half a second for a call.
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=threads,
        rpc_timeout=timeout,
        init_method="minidist://",
        _transports=["uv"],
    )
    with warnings.catch_warnings():  # torch's own use of its own group
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
        rpc.init_rpc(name_of(rank), rank=rank, world_size=world_size, rpc_backend_options=options)
    _Process.sessions += 1
    session = RpcSession()
    # They meet in a group of their own: what a rank serves meanwhile may use the default group.
    leaving = dist.new_group(backend="gloo")
    try:
        yield session
        if session.together:
            dist.barrier(leaving)  # not in `shutdown`, where nobody waits longer than `timeout`
    except BaseException:
        session.together = False
        raise
    finally:
        try:
            with _silent() if session.together else nullcontext():
                rpc.shutdown(graceful=session.together, timeout=int(timeout))
        finally:
            dist.destroy_process_group(leaving)


def _rendezvous(url: str, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    # A port of its own could be taken again, and torch would look for a store that has ended.
    store: Any = dist.distributed_c10d._get_default_store()
    yield store.clone(), dist.get_rank(), dist.get_world_size()


dist.register_rendezvous_handler("minidist", _rendezvous)


@contextmanager
def _silent() -> Iterator[None]:
    """Without what torch's C++ prints: when all leave together, an answer that has arrived, but
    whose sender closes before its own thread knows it, is no error."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
