"""Lesson: data_parallel. Data parallelism in one process, with a thread for each device.

One forward pass of `DataParallel` is four operations, each a function of its own here:

    shares   = scatter(inputs, devices)        cut the batch, a share for each device
    replicas = replicate(module, devices)      copy the module to each device
    outputs  = parallel_apply(replicas, ...)   run each replica on its share, in a thread
    output   = gather(outputs, device)         join the outputs

Autograd goes through all four, backwards: the gradient of the output is cut, each replica makes
gradients for its own copies of the parameters, and the backward of `replicate` sums those up.

They do what those of `torch.nn.parallel` do, and run on the CPU too, where torch's do not. A list
of devices may name one device several times: `["cpu", "cpu"]` is two replicas.
"""

import threading
from collections.abc import Sequence
from functools import reduce
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from minidist.common.wrapper import Wrapper

Device = str | int | torch.device


class DataParallel(Wrapper):
    """`module` on several devices at once: each runs it on its share of the batch.

        model = DataParallel(module, device_ids=[0, 1])
        loss_fn(model(x), y).backward()        # adds the gradients up in module.parameters()

    The arguments are those of torch's class. `device_ids` are numbers of CUDA devices, or names
    such as "cpu"; None means all CUDA devices, or, where there is none, the CPU as the only one.
    With one device the module itself runs, without a replica. The parameters and buffers of
    `module` must be on the first. Inputs are scattered and outputs gathered by rows; the output
    goes to `output_device`, or else to the first device.

    A forward pass makes new replicas, so what `forward` stores in a module is lost. What it writes
    *into* a buffer on the first device stays: that replica shares the module's memory. Dropout in
    several replicas on one device draws from one generator, in whatever order the threads come. So
    a checkpoint with dropout may draw other numbers when it computes again, and gradients are then
    wrong: have a device for each replica there.

    Raises ValueError if there is no device, or not this one; if the module is elsewhere; and if
    the inputs have different numbers of rows. An exception of a replica is raised with a note that
    names the replica.
    Lesson: data_parallel.
    """

    devices: list[torch.device]
    output_device: torch.device

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
    ) -> None:
        super().__init__(module)
        if device_ids is None:
            device_ids = range(torch.cuda.device_count()) or ["cpu"]
        self.devices = _devices(device_ids)
        self.output_device = self.devices[0] if output_device is None else _device(output_device)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        first = self.devices[0]
        for name, tensor in chain(self.module.named_parameters(), self.module.named_buffers()):
            if tensor.device != first:
                raise ValueError(
                    f"the module must be on {first}, its first device, but its {name!r} is on "
                    f"{tensor.device}: call module.to({str(first)!r}) before"
                )
        shares = scatter((inputs, kwargs), self.devices)
        if len(self.devices) == 1:
            ((inputs, kwargs),) = shares  # on that device now
            return self.module(*inputs, **kwargs)
        devices = self.devices[: len(shares)]  # a small batch has fewer shares
        replicas = replicate(self.module, devices)
        args, kws = zip(*shares, strict=True)
        outputs = parallel_apply(replicas, args, kws, devices)
        return gather(outputs, self.output_device)


def scatter(inputs: Any, devices: Sequence[Device]) -> list[Any]:
    """Cut every tensor among `inputs` by rows: the list of the devices' shares.

    `inputs` is a tensor, or tuples, lists and dicts, nested in any way; each share has the same
    form, and in the place of whatever is no tensor the same object. Tensors are cut as
    `torch.chunk` does: the last share can be smaller, and there can be fewer shares than devices.
    Without any tensor there is one share. Raises ValueError if tensors have
    other numbers of rows.
    Lesson: data_parallel.
    """
    devices = _devices(devices)
    leaves, form = tree_flatten(inputs)
    shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if len({shape[:1] for shape in shapes}) > 1:
        raise ValueError(f"tensors of shapes {shapes} have different numbers of rows")
    count = len(devices)
    pieces = [
        [piece.to(device) for piece, device in zip(leaf.chunk(count), devices, strict=False)]
        if isinstance(leaf, torch.Tensor)
        else [leaf] * count
        for leaf in leaves
    ]
    shares = min(map(len, pieces)) if shapes else 1
    return [tree_unflatten([piece[i] for piece in pieces], form) for i in range(shares)]


def replicate(module: nn.Module, devices: Sequence[Device]) -> list[nn.Module]:
    """Copies of `module`, one for each device, whose gradients arrive in `module`.

    A replica's parameters are not leaves: they are results of an operation upon the module's own,
    and its backward sums the gradients of all replicas. The first replica shares the memory of
    the module's parameters and buffers if it is on their device. A parameter that stands in several
    places does so in each replica. Everything else, hooks too, is the same object in all. Unlike
    torch's, a replica has its copies in `parameters()`.
    Lesson: data_parallel.
    """
    devices = _devices(devices)
    tensors = chain(module.parameters(), module.buffers())
    copies = {tensor: _Broadcast.apply(tensor, devices) for tensor in tensors}
    replicas = []
    for i in range(len(devices)):
        # torch's own shallow copy of one module, which some modules extend
        clones: dict[Any, Any] = {
            part: part._replicate_for_data_parallel() for part in module.modules()
        }
        for part, clone in clones.items():
            for name, child in part._modules.items():
                clone._modules[name] = clones.get(child)
            for name, buffer in part._buffers.items():
                clone._buffers[name] = None if buffer is None else copies[buffer][i]
            for name, parameter in part._parameters.items():
                if parameter is None:
                    clone._parameters[name] = None
                else:
                    # As an attribute first: an RNN then keeps its list of weights in step.
                    setattr(clone, name, copies[parameter][i])
                    clone._parameters[name] = clone.__dict__.pop(name)
        replicas.append(clones[module])
    return replicas


def parallel_apply(
    replicas: Sequence[nn.Module],
    inputs: Sequence[tuple[Any, ...]],
    kwargs: Sequence[dict[str, Any]],
    devices: Sequence[torch.device],
) -> list[Any]:
    """Run `replicas[i](*inputs[i], **kwargs[i])` for all i at once: the list of outputs.

    Each call has a thread of its own, named "replica i", in which grad mode and autocast are as in
    the caller's. If calls fail, the exception of the first of them is raised, with a note of
    replica and device. Lesson: data_parallel.
    """
    trains, kinds = torch.is_grad_enabled(), [device.type for device in devices]
    # Made here, and so in our dtype: another thread knows nothing of it.
    autocast = [torch.autocast(kind, enabled=torch.is_autocast_enabled(kind)) for kind in kinds]
    outputs: list[Any] = [None] * len(replicas)
    failures: list[BaseException | None] = [None] * len(replicas)

    def work(i: int) -> None:
        try:
            with torch.set_grad_enabled(trains), autocast[i]:
                outputs[i] = replicas[i](*inputs[i], **kwargs[i])
        except BaseException as error:
            error.add_note(f"This was replica {i}, on device {devices[i]}.")
            failures[i] = error

    threads = [
        threading.Thread(target=work, args=(i,), name=f"replica {i}") for i in range(len(replicas))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in filter(None, failures):
        raise failure
    return outputs


def gather(outputs: Sequence[Any], output_device: Device) -> Any:
    """Join the outputs of the replicas, tensor by tensor, by rows: the reverse of `scatter`.

    An output is a tensor, or tuples, lists and dicts of tensors, nested in any way but the same
    in each replica. Tensors without a dimension, such as losses, become a vector, an element a
    replica (torch warns of that; there is no other way). None stays None. Raises ValueError if the
    forms differ. Lesson: data_parallel.
    """
    device = _device(output_device)

    def join(*parts: Any) -> Any:
        if all(part is None for part in parts):
            return None
        parts = tuple(part.to(device) for part in parts)
        return torch.cat(parts) if any(part.dim() for part in parts) else torch.stack(parts)

    first, *others = outputs
    return tree_map(join, first, *others)


class _Broadcast(torch.autograd.Function):
    """Copies of a tensor, one for each device. Backward: the sum of the copies' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, devices: list[torch.device]) -> Any:
        ctx.home = tensor.device
        ctx.set_materialize_grads(False)  # None is the gradient of a copy that was not used
        # The first shares our memory if it is on our device. Detached, it is no view to autograd,
        # which would forbid to write into it: one of many views of one tensor.
        first = tensor.detach().to(devices[0])
        return first, *(tensor.to(device, copy=True) for device in devices[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        here = [gradient.to(ctx.home) for gradient in gradients if gradient is not None]
        return (reduce(torch.add, here) if here else None), None


def _devices(devices: Sequence[Device]) -> list[torch.device]:
    if not devices:
        raise ValueError("no devices: name one at least, such as 'cpu'")
    return [_device(device) for device in devices]


def _device(device: Device) -> torch.device:
    """Of "cuda", the current one, with its number, as tensors have it."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # the latter if torch has no CUDA at all
        raise ValueError(f"there is no device {device!r} here: {error}") from error
