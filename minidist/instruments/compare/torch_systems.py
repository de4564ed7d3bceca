"""The training by what comes with torch."""

from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from minidist.instruments.bench.tensor import split_by_torch
from minidist.instruments.compare.model_parts import blocks, by_model_names, sequence
from minidist.instruments.compare.task import System, Task, replicas
from minidist.instruments.compare.watched_steps import State, Watch
from minidist.pipeline import balance_by_parameters


def ddp(task: Task, watch: Watch) -> State:
    model = TorchDDP(task.make())
    return replicas(task, watch, model, task.optimizer(model.parameters()))


def fsdp(task: Task, watch: Watch) -> State:
    """`fully_shard`, which shards in place by DTensors."""
    model, mesh = task.make(), init_device_mesh(task.device.type, (dist.get_world_size(),))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = replicas(task, watch, model, task.optimizer(model.parameters()))
    return whole(state)


def pipeline(task: Task, watch: Watch) -> State:
    """A stage on each rank, by 1F1B."""
    model, rank, ranks = task.make(), dist.get_rank(), dist.get_world_size()
    layers = sequence(model)
    cuts = [0, *accumulate(balance_by_parameters(layers, ranks))]
    part = layers[cuts[rank] : cuts[rank + 1]]
    named = by_model_names(model, layers, layers.state_dict())
    optimizer = task.optimizer(part.parameters())
    stage = pipelining.PipelineStage(part, rank, ranks, task.device)
    schedule = pipelining.Schedule1F1B(stage, task.microbatches, loss_fn=task.loss)
    for inputs, targets in task.batches():
        losses: list[torch.Tensor] = []
        last: Any = dict(target=targets, losses=losses) if rank == ranks - 1 else {}
        with watch.step(part, optimizer):
            optimizer.zero_grad()
            schedule.step(*[inputs] * (rank == 0), return_outputs=False, **last)
            optimizer.step()
        if losses:
            watch.loss(torch.stack(losses).mean())
    mine = {p.data_ptr() for p in part.parameters()}
    return {name: tensor for name, tensor in named.items() if tensor.data_ptr() in mine}


STYLES = {"columns": ColwiseParallel, "rows": RowwiseParallel}


def tensor(task: Task, watch: Watch) -> State:
    """Every rank has some features of every layer, as DTensors."""
    model: Any = task.make()
    mesh = init_device_mesh(task.device.type, (dist.get_world_size(),))
    plan = getattr(model, "tensor_plan", None)
    if plan is None:
        split_by_torch(model, mesh)
    else:
        parallelize_module(model, mesh, {name: STYLES[style]() for name, style in plan.items()})
    optimizer = task.optimizer(model.parameters())
    for inputs, targets in task.batches():
        with watch.step(model, optimizer), loss_parallel():
            optimizer.zero_grad()
            loss = task.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        watch.loss(loss.full_tensor() if isinstance(loss, DTensor) else loss)
    state = whole(model.state_dict())
    return joined(state) if plan is None else state


def whole(state: Any) -> State:
    """DTensors, gathered."""
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}


def joined(state: State) -> State:
    """By the names of a `zoo.Transformer`, whose queries, keys and values are one matrix."""
    found = {}
    for name, tensor in state.items():
        place, attention, last = name.partition(".attention.")
        if not attention:
            found[name] = tensor
        elif last == "q.weight":
            parts = [state[f"{place}{attention}{each}.weight"] for each in "qkv"]
            found[f"{place}.qkv.weight"] = torch.cat(parts)
        elif last[0] not in "kv":
            found[f"{place}.{last}"] = tensor
    return found


SYSTEMS = [
    System("torch DDP", ddp, stage=0),
    System("torch FSDP", fsdp, stage=3),
    System("torch pipeline", pipeline),
    System("torch tensor", tensor),
]
