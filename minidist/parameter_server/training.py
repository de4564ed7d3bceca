"""Training with a server: what each rank does (lesson: parameter_server)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc

from minidist.common.groups import require_group
from minidist.common.replicas import require_same_model
from minidist.parameter_server.rpc_session import name_of, rpc_session
from minidist.parameter_server.server import Server


@dataclass(frozen=True)
class Served:
    """What the server has at the end.

    staleness: of each gradient, as they came, the updates between the weights that it was computed
    with and those that it changed. pushed_by: the rank that it came from.
    """

    weights: dict[str, torch.Tensor]
    updates: int
    staleness: list[int]
    pushed_by: list[int]


def train(
    model: Callable[[], nn.Module],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    loop: Callable[[nn.Module, "ServedOptimizer"], Any],
    *,
    synchronous: bool = True,
    bound: int | None = None,
    timeout: float = 30,
) -> Any:
    """Every rank calls this: rank 0 holds the weights, the others train.

        def loop(model, optimizer):
            for x, y in my_batches:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()                # push the gradients, pull the weights

        r(md.parameter_server.train, make_model, make_optimizer, loop)

    model: makes it, on every rank; the weights are those of rank 0. Buffers are each trainer's own.
    optimizer: called on the server with the parameters.
    loop: the training, called on each trainer. Returns what `loop` does, on the server a `Served`.
    synchronous, bound: see `Server`. timeout: seconds that a step may wait for other trainers.

    Raises ValueError for a bound that makes no sense; on every rank, if models differ; RuntimeError
    without a process group, or if synchronous trainers have different numbers of batches.
    Limits: a rank that dies ends the training. What started the ranks says so, and ends the others.
    Lesson: parameter_server.
    """
    group = require_group(None, "parameter_server.train")
    if bound is not None and (synchronous or bound < 0):
        raise ValueError(f"a bound is for asynchronous trainers, and 0 or more, not {bound}")
    net = model()
    require_same_model(net, group)
    if dist.get_rank() > 0:
        with rpc_session(timeout):
            served = ServedOptimizer(net.parameters())
            result = loop(net, served)
            _call("leave", dist.get_rank())
        return result
    trainers = range(1, group.size())
    server = Server(net.parameters(), optimizer(net.parameters()), trainers, synchronous, bound)
    Server.here = server  # before anybody can call it
    with rpc_session(timeout):
        pass  # the calls are served until all trainers have come to its end
    weights = {name: parameter.detach() for name, parameter in net.named_parameters()}
    return Served(weights, server.version, server.staleness, server.pushed_by)


class ServedOptimizer:
    """In place of a trainer's optimizer: `step` pushes the gradients to the server, and copies the
    weights that come back. The learning rate is the server's. Lesson: parameter_server."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._take(_call("pull"))

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        """It comes back when the server lets this trainer go on."""
        gradients = [parameter.grad for parameter in self.parameters]
        self._take(_call("push", dist.get_rank(), self.version, gradients))

    @torch.no_grad()
    def _take(self, answer: Any) -> None:
        self.version, weights = answer
        for parameter, weight in zip(self.parameters, weights, strict=True):
            parameter.copy_(weight)


def _call(method: str, *args: Any) -> Any:
    return rpc.rpc_sync(name_of(0), _called, args=(method, *args))


def _called(method: str, *args: Any) -> Any:
    return getattr(Server.here, method)(*args)
