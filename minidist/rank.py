"""What makes a process a rank. Lesson: rank.

Training on many devices is many copies of one program. Environment variables say to each copy
which one it is: its *rank*, out of *world size* ranks. Ranks find each other at a *rendezvous*, and
from then on send each other tensors in a *process group*.

`torchrun` starts such copies from a terminal. `launch` and `ranks` start them from a notebook
cell, with the same variables, so the same function runs under both.
"""

import atexit
import gc
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # early: see _forget_meshes

import minidist.machine.backend  # noqa: F401 - it registers the backend "shm"
from minidist.instruments.link import Link
from minidist.machine.runtime import Pool


@dataclass(frozen=True)
class Place:
    """Where a rank stands in the world: `rank == node_rank * local_world_size + local_rank`."""

    rank: int
    world_size: int
    local_rank: int  # among the ranks of its node: the number of its GPU
    local_world_size: int
    node_rank: int

    @classmethod
    def of(cls, rank: int, world_size: int, nodes: int = 1) -> "Place":
        """The place of `rank` when the world is spread evenly over `nodes`."""
        local_world_size = world_size // nodes
        node_rank, local_rank = divmod(rank, local_world_size)
        return cls(rank, world_size, local_rank, local_world_size, node_rank)

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> "Place":
        """The place that torchrun's variables name. Raises RuntimeError where there are none."""
        try:
            return cls(
                rank=int(environ["RANK"]),
                world_size=int(environ["WORLD_SIZE"]),
                local_rank=int(environ["LOCAL_RANK"]),
                local_world_size=int(environ["LOCAL_WORLD_SIZE"]),
                node_rank=int(environ["GROUP_RANK"]),
            )
        except KeyError as missing:
            raise RuntimeError(
                f"this process is not a rank: {missing} is not in its environment. "
                "Start it by md.launch, md.ranks or torchrun."
            ) from None

    def environ(self) -> dict[str, str]:
        """The variables that torchrun sets, but for those of its own rendezvous."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),  # torchrun calls a node a group
            "GROUP_WORLD_SIZE": str(self.world_size // self.local_world_size),
        }


def device(module: torch.nn.Module | None = None) -> torch.device:
    """The device of this rank: its own GPU where the group speaks NCCL, else the CPU. Given a
    module that is not on "meta": where that is."""
    if module is not None:
        for tensor in chain(module.parameters(), module.buffers()):
            if not tensor.is_meta:
                return tensor.device
    if "nccl" in str(dist.get_backend_config()):
        return torch.device("cuda", Place.here().local_rank)
    return torch.device("cpu")


@contextmanager
def join(
    backend: str = "auto", timeout: float = 30, store: dist.Store | None = None
) -> Iterator[Callable[[], int]]:
    """Be a rank: make the default process group, and leave it at the end.

    Who am I comes from the environment; where the others are comes from `store`, or else from
    MASTER_ADDR and MASTER_PORT. `backend` "auto" is NCCL (and gloo for CPU tensors) where every
    rank of a node has a GPU of its own; else shm where all ranks are on one machine; else gloo; and
    shm where a link is emulated. No collective waits longer than `timeout` seconds. Yields a
    function that counts this rank's operations so far, in any group. Lesson: rank.
    """
    place = Place.here()
    if backend == "auto":
        backend = _best(place, store)
    if "nccl" in backend:
        torch.cuda.set_device(place.local_rank)
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=timeout),
        store=store,
        rank=place.rank,
        world_size=place.world_size,
    )
    groups: Any = dist.distributed_c10d._world.pg_map
    with _default_timeout(timedelta(seconds=timeout)):
        yield lambda: sum(group._get_sequence_number_for_group() for group in groups)
    # A wrapper in a reference cycle would keep the group beyond its end: its threads would outlive
    # the interpreter, which then aborts.
    gc.collect()
    # Not after an exception: a group with a call half done can block here for ever.
    dist.destroy_process_group()


@atexit.register
def _forget_meshes() -> None:
    """DTensor remembers meshes, and with them their groups, whose threads in gloo would outlive
    Python: then the process is aborted now and then. The functions of torch.distributed.nn would
    keep the default group, if they were imported when there is one."""
    if "torch.distributed.tensor" in sys.modules:
        gc.collect()
        torch._C._clear_DTensor_sharding_propagator_cache()
        gc.collect()


def _best(place: Place, store: dist.Store | None) -> str:
    if Link.here() is not None:
        return "shm"  # which alone emulates a link
    if torch.cuda.device_count() >= place.local_world_size:
        return "cpu:gloo,cuda:nccl"
    # A rendezvous in a file is one on this machine, however many nodes it plays.
    one_machine = place.world_size == place.local_world_size or type(store) is dist.FileStore
    return "shm" if one_machine else "gloo"


@contextmanager
def _default_timeout(timeout: timedelta) -> Iterator[None]:
    """For groups made later, by new_group or a mesh: torch would let them wait for half an hour."""
    c10d: Any = dist.distributed_c10d
    before = c10d.default_pg_timeout, c10d.default_pg_nccl_timeout
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout
    try:
        yield
    finally:
        c10d.default_pg_timeout, c10d.default_pg_nccl_timeout = before


def ranks(
    world_size: int,
    backend: str = "auto",
    nodes: int = 1,
    timeout: float = 30,
    threads: int = 1,
    link: Link | None = None,
) -> Pool:
    """Start `world_size` ranks on this machine, each a process; use them in a `with`.

    `with md.ranks(4) as r: r(fn, *args)` runs `fn(*args)` on every rank and returns the list of
    results in rank order. What a rank holds stays between calls. `nodes` spreads the ranks over so
    many nodes, in name only: it sets (node_rank, local_rank). `timeout` (seconds) bounds every wait
    for another rank; `threads` is each rank's number of CPU threads for torch. `link` is a network
    that backend "shm" emulates; "auto" is then shm. As under torchrun, each rank has random numbers
    of its own, others at each start, until you seed it. Raises ValueError on numbers that make no
    sense, RankError if a rank fails. Lesson: rank.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be 1 or more, not {world_size}")
    if nodes < 1 or world_size % nodes:
        raise ValueError(f"{world_size} ranks cannot be spread evenly over {nodes} nodes")
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be a finite number of seconds above 0, not {timeout}")
    if threads < 1:
        raise ValueError(f"threads must be 1 or more, not {threads}")
    if ":" not in backend and backend not in ("auto", *dist.Backend.backend_list):
        known = ", ".join(["auto", *sorted(set(dist.Backend.backend_list) - {"undefined"})])
        raise ValueError(f"there is no backend {backend!r}; there are {known}")
    if link is not None and backend not in ("auto", "shm"):
        raise ValueError(f'only backend "shm" emulates a link, not {backend!r}')
    places = [Place.of(rank, world_size, nodes) for rank in range(world_size)]
    environs = [_environ(place, threads) | Link.environ(link) for place in places]
    shm = ["minidist.machine.backend.process_group"] if backend in ("auto", "shm") else []
    return Pool(environs, partial(_stage, backend, timeout, threads), timeout, shm)


def launch(fn: Callable[..., Any], *args: Any, world_size: int = 4, **options: Any) -> list[Any]:
    """Run `fn(*args)` once on `world_size` fresh ranks: the list of results, in rank order.

    `options` are those of `ranks`. Under torchrun the ranks are there already: `fn` runs in this
    one, and every rank returns the list; how many there are, on how many nodes, is torchrun's to
    say. So a script that ends in `md.launch(main)` runs by `python` and by `torchrun`. Each rank
    has random numbers of its own by both, until you seed it.
    Lesson: rank.
    """
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        os.environ |= Link.environ(options.get("link"))
        with join(options.get("backend", "auto"), options.get("timeout", 30)):
            results: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(results, fn(*args))
        return results
    with ranks(world_size, **options) as r:
        return r(fn, *args)


@contextmanager
def _stage(backend: str, timeout: float, threads: int, folder: str) -> Iterator[Callable[[], int]]:
    """What a rank of a pool lives in. The rendezvous is a file: no port can be taken."""
    torch.set_num_threads(threads)
    # After a fork Python seeds its `random` again. torch and numpy do not, so we do.
    torch.default_generator.seed()
    if random := sys.modules.get("numpy.random"):
        random.seed()
    store = dist.FileStore(os.path.join(folder, "rendezvous"), Place.here().world_size)
    with join(backend, timeout, store) as progress:
        yield progress


def _environ(place: Place, threads: int) -> dict[str, str]:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environ = {
        "GLOO_SOCKET_IFNAME": loopback,  # no firewall and no host name to stumble over
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        **place.environ(),
    }
    if place.world_size > place.local_world_size:  # local ranks of two nodes would share a GPU
        environ["CUDA_VISIBLE_DEVICES"] = ""
    return environ
