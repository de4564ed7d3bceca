"""The idea, in thirty lines: one rank holds the weights, the others push gradients to it.

    server = NaiveServer(model, optimizer, trainers=2)      # on rank 0, before RPC begins

    server = rpc.remote("rank0", NaiveServer.here)          # on a trainer: an RRef
    for x, y in my_batches:
        loss_fn(model(x), y).backward()
        push(model, server)

A remote call runs in a thread of the server. There it waits until all trainers have called; the
last one steps, and each gets the new weights as its answer. What the other files add: asynchronous
servers, several servers, and ranks that die. Lesson: beyond_gradients.
"""

import threading
from typing import Any

import torch
from torch import nn


class NaiveServer:
    """The weights, and the only optimizer. Each of `trainers` ranks pushes once a step."""

    current: "NaiveServer"

    def __init__(self, model: nn.Module, optimizer: Any, trainers: int) -> None:
        self.parameters, self.optimizer = list(model.parameters()), optimizer
        self.trainers, self.lock = trainers, threading.Lock()
        self.all_pushed = threading.Barrier(trainers, action=self.step)
        NaiveServer.current = self

    @staticmethod
    def here() -> "NaiveServer":
        return NaiveServer.current

    def push(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Add a share of the mean gradient; wait for the others; the new weights."""
        with self.lock:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                share = gradient / self.trainers
                parameter.grad = share if parameter.grad is None else parameter.grad + share
        self.all_pushed.wait()
        return [parameter.detach() for parameter in self.parameters]

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def push(model: nn.Module, server: Any) -> None:
    """Let the server, an RRef, take the gradients of this rank's model, which gets its weights."""
    weights = server.rpc_sync().push([p.grad for p in model.parameters()])
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
        parameter.grad = None
