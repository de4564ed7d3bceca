"""The training by minidist: each in the lines that a reader would write."""

from functools import partial
from typing import Any

import minidist as md
from minidist.instruments.compare.model_parts import by_model_names, checkpoint, policy, sequence
from minidist.instruments.compare.task import System, Task, replicas
from minidist.instruments.compare.watched_steps import State, Watch
from minidist.tensor_parallel import VocabParallelLinear, full_state_dict, parallelize_module


def one_process(task: Task, watch: Watch) -> State:
    """The whole batch, on one rank."""
    model = task.make()
    return replicas(task, watch, model, task.optimizer(model.parameters()))


def data_parallel(task: Task, watch: Watch) -> State:
    """Threads of one process."""
    model = md.DataParallel(task.make(), [task.device] * task.world_size)
    state = replicas(task, watch, model, task.optimizer(model.parameters()))
    watch.memory, watch.note = {}, "its memory is in threads, which MemoryTracker does not see"
    return state


def distributed_data_parallel(task: Task, watch: Watch) -> State:
    model = md.DistributedDataParallel(task.make())
    return replicas(task, watch, model, task.optimizer(model.parameters()))


def zero_1(task: Task, watch: Watch) -> State:
    """DDP, and optimizer states that are shared out."""
    model = md.DistributedDataParallel(task.make())
    make = md.ZeroRedundancyOptimizer
    optimizer = make(model.parameters(), task.optimizer_class, **task.options)
    return replicas(task, watch, model, optimizer)


def zero_2(task: Task, watch: Watch) -> State:
    """And gradients."""
    model, make = task.make(), md.ZeroRedundancyOptimizer
    optimizer = make(model.parameters(), task.optimizer_class, **task.options)
    return replicas(task, watch, md.ShardedDataParallel(model, optimizer), optimizer)


def fully_sharded(
    task: Task, watch: Watch, checkpoints: bool = False, offloads: bool = False
) -> State:
    """A unit for each block."""
    module = task.make()
    if checkpoints:
        checkpoint(module)
    model = md.FullyShardedDataParallel(module, auto_wrap_policy=policy(module))
    make: Any = md.OffloadedOptimizer.of if offloads else lambda kind: kind
    optimizer = make(task.optimizer_class)(model.parameters(), **task.options)
    return replicas(task, watch, model, optimizer)


def pipeline(task: Task, watch: Watch) -> State:
    """A stage on each rank, by 1F1B."""
    model = md.Pipeline(sequence(task.make()), task.microbatches)
    optimizer = task.optimizer(model.parameters())
    for inputs, targets in task.batches():
        with watch.step(model, optimizer):
            optimizer.zero_grad()
            loss = model.train_step(inputs, targets, task.loss)
            optimizer.step()
        watch.loss(loss)
    whole = task.make()
    return by_model_names(whole, sequence(whole), model.full_state_dict())


def tensor(task: Task, watch: Watch) -> State:
    """Every rank has some features of every layer."""
    model = task.make()
    parallelize_module(model, None, getattr(model, "tensor_plan", None))
    optimizer = task.optimizer(model.parameters())
    by_vocabulary = any(isinstance(layer, VocabParallelLinear) for layer in model.modules())
    loss_of = md.vocab_parallel_cross_entropy if by_vocabulary else task.loss
    for inputs, targets in task.batches():
        with watch.step(model, optimizer):
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            loss.backward()
            optimizer.step()
        watch.loss(loss)
    return full_state_dict(model)


def mixed(task: Task, watch: Watch) -> State:
    """Features over two ranks, layers over two where there are eight ranks, and replicas."""
    stages = 1 if task.world_size % 8 else 2
    replicas = task.world_size // (2 * stages)
    watch.note = f"data {replicas} × pipeline {stages} × tensor 2"
    mesh, module = md.mixed.mesh(replicas, stages, 2), task.make()
    microbatches = min(task.microbatches, task.rows // replicas) if stages > 1 else 1
    plan = getattr(module, "tensor_plan", None)
    model = md.mixed.MixedParallel(module, mesh, microbatches, plan=plan)
    optimizer = task.optimizer(model.parameters())
    replica = mesh.get_local_rank("data")
    for batch in task.batches():
        inputs, targets = (part[replica::replicas] for part in batch)
        with watch.step(model, optimizer):
            optimizer.zero_grad()
            loss = model.train_step(inputs, targets, model.cross_entropy)
            optimizer.step()
        watch.loss(loss)
    return model.full_state_dict()


SYSTEMS = [
    System("one process", one_process, one_process=True),
    System("DP", data_parallel, one_process=True),
    System("DDP", distributed_data_parallel, stage=0),
    System("ZeRO-1", zero_1, stage=1),
    System("ZeRO-2", zero_2, stage=2),
    System("FSDP", fully_sharded, stage=3),
    System("FSDP + checkpointing", partial(fully_sharded, checkpoints=True), stage=3),
    System("FSDP + offload", partial(fully_sharded, offloads=True), stage=3),
    System("pipeline", pipeline),
    System("tensor", tensor),
    System("mixed", mixed),
]
