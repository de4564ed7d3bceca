"""Ranks that call functions on each other (lesson: parameter_server)."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import rpc

from minidist.common.groups import require_group


def name_of(rank: int) -> str:
    """What a rank is called in remote calls."""
    return f"rank{rank}"


@contextmanager
def rpc_session(timeout: float = 30) -> Iterator[None]:
    """Let the ranks of the default group call each other by `torch.distributed.rpc`.

        with rpc_session():
            rpc.rpc_sync(name_of(1), torch.add, args=(x, 1))

    Every rank enters, and all that it is called for must be there before. At the end a rank serves
    the others until all have come there; not after an exception. A call that has no answer after
    `timeout` seconds fails. Raises RuntimeError without a process group, or where RPC runs already.
    Lesson: parameter_server.
    """
    require_group(None, "rpc_session")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # By TCP (a private argument): torch's transport by shared memory polls on every rank all the
    # time. On two cores, four ranks that train then waited up to half a second for a call.
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=max(16, world_size),  # a call may wait for those of all other ranks
        rpc_timeout=timeout,
        init_method="minidist://",
        _transports=["uv"],
    )
    with warnings.catch_warnings():  # torch's own use of its own group
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
        rpc.init_rpc(name_of(rank), rank=rank, world_size=world_size, rpc_backend_options=options)
    try:
        yield
    except BaseException:
        rpc.shutdown(graceful=False)
        raise
    rpc.shutdown()


def _rendezvous(url: str, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    # A port of its own could be taken again, and torch would look for a store that has ended.
    store: Any = dist.distributed_c10d._get_default_store()
    yield store.clone(), dist.get_rank(), dist.get_world_size()


dist.register_rendezvous_handler("minidist", _rendezvous)
