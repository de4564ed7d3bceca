"""Ranks that call functions on each other, and how they part (lesson: beyond_gradients)."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import rpc

from minidist.common.agree import gather
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

    The rendezvous is a port of rank 0 that the system chose: in a pool MASTER_ADDR is absent, and
    a second session needs another one. Raises RuntimeError without a process group, or where RPC
    runs already. Lesson: beyond_gradients.
    """
    group = require_group(None, "rpc_session")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    host = os.environ.get("MASTER_ADDR", "localhost")
    # torch's own store of rank 0 finds this one on the same port, and shares it: multi_tenant.
    mine = (
        dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        if rank == 0
        else None
    )
    port = gather(group, mine and mine.port)[0]
    # By TCP (a private argument): torch's transport by shared memory polls on every rank all the
    # time. On two cores, four ranks that train then waited up to half a second for a call.
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=threads,
        rpc_timeout=timeout,
        init_method=f"tcp://{host}:{port}",
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
            rpc.shutdown(graceful=session.together, timeout=int(timeout))
            if session.together:
                dist.barrier(leaving)  # they leave by the store of rank 0, which ends here
        finally:
            dist.destroy_process_group(leaving)
