"""Training with servers: what each rank does (lesson: beyond_gradients)."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc
from torch.futures import Future

from minidist.common.agree import require_same
from minidist.common.groups import require_group
from minidist.parameter_server.rpc_session import name_of, rpc_session
from minidist.parameter_server.server_shard import ServerShard, share_out


@dataclass(frozen=True)
class Served:
    """What a server has at the end.

    weights: its shard, by the names of the model. staleness: of each gradient, as they came, the
    updates between the weights that it was computed with and those that it changed. pushed_by: the
    rank that it came from. died: ranks of trainers.
    """

    weights: dict[str, torch.Tensor]
    updates: int
    staleness: list[int]
    pushed_by: list[int]
    died: list[int]


def train(
    model: Callable[[], nn.Module],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    loop: Callable[[nn.Module, "ServedOptimizer"], Any],
    *,
    servers: int = 1,
    synchronous: bool = True,
    bound: int | None = None,
    timeout: float = 30,
) -> Any:
    """Every rank calls this: the first `servers` ranks hold the weights, the others train.

        def loop(model, optimizer):
            for x, y in my_batches:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()                # push the gradients, pull the weights

        r(md.parameter_server.train, make_model, make_optimizer, loop)

    model: makes it, on every rank; the weights are those of the servers' models. Buffers are each
        trainer's own.
    optimizer: called on each server with its parameters. It must step each by itself, as SGD and
        Adam do.
    loop: the training, called on each trainer.
    synchronous, bound: see `ServerShard`. timeout: seconds that a step may wait for other trainers.

    Returns what `loop` does on a trainer, a `Served` on a server. Raises ValueError for arguments
    that make no sense; on every rank, if models or arguments differ between ranks; RuntimeError
    without a process group, or if the trainers' batches differ in number where training is
    synchronous. ConnectionError on the trainers if a server dies. If a trainer dies or raises an
    error, ConnectionError on all others where training is synchronous; else they go on without it.
    Lesson: beyond_gradients.
    """
    group = require_group(None, "parameter_server.train")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if not 1 <= servers < world_size:
        raise ValueError(f"{servers} servers among {world_size} ranks: needs 1, and a trainer")
    if bound is not None and (synchronous or bound < 0):
        raise ValueError(
            f"bound is how many steps ahead an asynchronous trainer may be, 0 or more, not {bound} "
            f"with synchronous={synchronous}"
        )
    net = model()
    named = dict(net.named_parameters())
    outline = [(name, list(p.shape), str(p.dtype)) for name, p in named.items()]
    arguments = {"servers": servers, "synchronous": synchronous, "bound": bound}
    require_same(group, arguments | {"the model's parameters": outline})
    holder = share_out([p.numel() for p in named.values()], servers)
    if rank < servers:
        mine = {n: p for (n, p), h in zip(named.items(), holder, strict=True) if h == rank}
        others = range(servers, world_size)
        shard = ServerShard(mine.values(), optimizer(mine.values()), others, synchronous, bound)
        return _serve(shard, mine, timeout)
    return _train(net, loop, holder, timeout)


# ---- on a server -------------------------------------------------------------------------------


def _serve(shard: ServerShard, named: dict[str, nn.Parameter], timeout: float) -> Served:
    here.shard = shard
    with rpc_session(timeout) as session:
        # A call that a trainer answers when it leaves. It fails at once when the trainer dies.
        lines = {t: rpc.rpc_async(name_of(t), _until_it_leaves, timeout=0) for t in shard.steps}
        for trainer, line in lines.items():
            line.add_done_callback(lambda _, trainer=trainer: shard.lost(trainer))
        shard.over.wait()
        for line in lines.values():
            with suppress(RuntimeError):
                line.wait()
        session.together = not shard.died
        if shard.problem:
            raise shard.problem
    weights = {name: parameter.detach() for name, parameter in named.items()}
    return Served(weights, shard.version, shard.staleness, shard.pushed_by, shard.died)


# ---- on a trainer ------------------------------------------------------------------------------


class ServedOptimizer:
    """In place of a trainer's optimizer: `step` pushes the gradients of `parameters` to the
    servers, and copies the weights that come back. `holder` says which rank has each parameter. It
    has no learning rate for a scheduler: that is the servers' own.

    Raises ConnectionError that names a server that has died, TimeoutError that names one that gives
    no answer. Lesson: beyond_gradients.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], holder: list[int]) -> None:
        self.parameters = list(parameters)
        self.shards: dict[int, list[nn.Parameter]] = {server: [] for server in sorted(set(holder))}
        for parameter, server in zip(self.parameters, holder, strict=True):
            self.shards[server].append(parameter)
        self.versions = dict.fromkeys(self.shards, 0)
        self._take({server: _ask(server, _pull) for server in self.shards})

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        rank = dist.get_rank()
        self._take(
            {
                server: _ask(server, _push, rank, self.versions[server], [p.grad for p in shard])
                for server, shard in self.shards.items()
            }
        )

    def leave(self) -> list[int]:
        """This trainer is done. Returns, when all trainers are, the ranks of those that died."""
        asked = {s: _ask(s, _leave, dist.get_rank(), timeout=0) for s in self.shards}
        return sorted({died for s, answer in asked.items() for died in _answered(s, answer)})

    @torch.no_grad()
    def _take(self, asked: dict[int, Future[Any]]) -> None:
        for server, future in asked.items():
            answer = _answered(server, future)
            if isinstance(answer, Exception):
                raise answer
            self.versions[server], weights = answer
            for parameter, weight in zip(self.shards[server], weights, strict=True):
                parameter.copy_(weight)


def _train(net: nn.Module, loop: Callable[..., Any], holder: list[int], timeout: float) -> Any:
    here.left = Future()
    with rpc_session(timeout) as session:
        optimizer = ServedOptimizer(net.parameters(), holder)
        result = loop(net, optimizer)
        session.together = not optimizer.leave()
        here.left.set_result(None)
    return result


def _ask(server: int, function: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
    return rpc.rpc_async(name_of(server), function, args=args, **options)


def _answered(server: int, future: Future[Any]) -> Any:
    try:
        return future.wait()
    except RuntimeError as error:
        if "originated at tensorpipe" in str(error):  # of the connection, not of the call
            raise ConnectionError(
                f"Connection closed by the parameter server on rank {server}: it has died"
            ) from error
        if "ran for more than set timeout" in str(error):
            raise TimeoutError(
                f"the parameter server on rank {server} gave no answer in time: it hangs, or waits "
                "for a trainer that does"
            ) from error
        raise


# ---- what is called from elsewhere -------------------------------------------------------------


class _Here:
    """What this rank is called for."""

    shard: ServerShard
    left: Future[None]


here = _Here()


def _pull() -> tuple[int, list[torch.Tensor]]:
    return here.shard.pull()


@rpc.functions.async_execution
def _push(trainer: int, version: int, gradients: list[torch.Tensor | None]) -> Future[Any]:
    return here.shard.push(trainer, version, gradients)


@rpc.functions.async_execution
def _leave(trainer: int) -> Future[list[int]]:
    return here.shard.leave(trainer)


@rpc.functions.async_execution
def _until_it_leaves() -> Future[None]:
    return here.left
