"""A model split over ranks: RRef and distributed autograd (lesson: parameter_server)."""

from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from minidist.parameter_server.rpc_session import name_of


class RemoteStage:
    """A module that lives on another rank, and is called as if it were here.

        with rpc_session():
            first, second = RemoteStage(0, make_first), RemoteStage(1, make_second)
            with dist_autograd.context() as context:
                loss = loss_fn(second(first(x)), y)
                dist_autograd.backward(context, [loss])
                gradients = second.gradients(context)

    It has an RRef: a reference to something that rank `rank` owns. A call sends the input there and
    brings the output back. Autograd notes on both sides that a tensor has left, so backward sends
    the gradient the other way. The gradients of a rank's weights stay in the context, not in
    `.grad`: two contexts may run backward at the same time.

    make: called on that rank, makes the module. Limits: torch's RRefs work only in the first
    `rpc_session` of a process. PyTorch's notes on distributed autograd. Lesson: parameter_server.
    """

    def __init__(self, rank: int, make: Callable[[], nn.Module]) -> None:
        # By value: a function of a notebook is not there on the other rank by its name.
        self.rref = rpc.remote(name_of(rank), _make, args=(cloudpickle.dumps(make),))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, …). The output, which comes from the other rank."""
        out: torch.Tensor = self.rref.rpc_sync().forward(x)
        return out

    def gradients(self, context: int) -> dict[str, torch.Tensor]:
        """What backward has left there in this context, by the names of parameters."""
        return rpc.rpc_sync(self.rref.owner(), _gradients, args=(self.rref, context))

    def step(self, context: int, lr: float) -> None:
        """Plain gradient descent of this stage's parameters, there."""
        rpc.rpc_sync(self.rref.owner(), _descend, args=(self.rref, context, lr))


def _make(make: bytes) -> Any:
    return cloudpickle.loads(make)()


def _gradients(stage: rpc.RRef, context: int) -> dict[str, torch.Tensor]:
    found = dist_autograd.get_gradients(context)  # of all that lives on this rank
    return {n: found[p] for n, p in stage.local_value().named_parameters() if p in found}


@torch.no_grad()
def _descend(stage: rpc.RRef, context: int, lr: float) -> None:
    parameters = dict(stage.local_value().named_parameters())
    for name, gradient in _gradients(stage, context).items():
        parameters[name].sub_(lr * gradient)
