"""The training by minidist: each in the lines that a reader would write."""

from functools import partial
from typing import Any

import minidist as md
from minidist.instruments.compare.model_parts import (
    by_model_names,
    checkpoint,
    features_apart,
    layers_in_turn,
    plan_of,
    policy,
    sequence,
    taking,
)
from minidist.instruments.compare.systems import RefusedError, System
from minidist.instruments.compare.task import Task, replicas
from minidist.instruments.compare.watched_steps import State, Watch
from minidist.instruments.planner import Layout
from minidist.tensor_parallel import VocabParallelLinear, full_state_dict, parallelize_module


def one_process(task: Task, watch: Watch) -> State:
    """The whole batch, on one rank."""
    model = task.make()
    return replicas(task, watch, model, task.optimizer(model.parameters()))


def data_parallel(task: Task, watch: Watch) -> State:
    """Threads of one process."""
    with taking():
        model = md.DataParallel(task.make(), [task.device] * task.world_size)
    state = replicas(task, watch, model, task.optimizer(model.parameters()))
    watch.memory, watch.note = {}, "its memory is in threads, which MemoryTracker does not see"
    return state


def distributed_data_parallel(task: Task, watch: Watch) -> State:
    with taking():
        model = md.DistributedDataParallel(task.make())
    return replicas(task, watch, model, task.optimizer(model.parameters()))


def zero(task: Task, watch: Watch, stage: int) -> State:
    """Stages 1 and 2."""
    with taking():
        model = task.make()
        optimizer = md.ZeroRedundancyOptimizer(
            model.parameters(), task.optimizer_class, **task.options
        )
        wrapped = (
            md.DistributedDataParallel(model)
            if stage == 1
            else md.ShardedDataParallel(model, optimizer)
        )
    return replicas(task, watch, wrapped, optimizer)


def fully_sharded(
    task: Task, watch: Watch, checkpoints: bool = False, offloads: bool = False
) -> State:
    """A unit for each block."""
    with taking():
        module = task.make()
        if checkpoints:
            checkpoint(module)
        model = md.FullyShardedDataParallel(module, auto_wrap_policy=policy(module))
        make: Any = md.OffloadedOptimizer.of if offloads else lambda kind: kind
        optimizer = make(task.optimizer_class)(model.parameters(), **task.options)
    return replicas(task, watch, model, optimizer)


def pipeline(task: Task, watch: Watch) -> State:
    """A stage on each rank, by 1F1B."""
    with taking():
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
    with taking():
        model = task.make()
        parallelize_module(model, None, plan_of(model))
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


def on_a_mesh(task: Task) -> Layout:
    """Features over two ranks, layers over two where there are eight ranks, and replicas."""
    ranks = task.world_size
    if ranks < 4 or ranks % 2:
        raise RefusedError(f"two axes need an even number of ranks, 4 or more, not {ranks}")
    stages = 1 if ranks % 8 else 2
    rows = task.rows * 2 * stages // ranks  # of a replica
    m = min(task.microbatches, rows) if stages > 1 else 1
    return Layout(ranks, 2, stages, micro_batch=rows // m, micro_batches=m)


def mixed(task: Task, watch: Watch) -> State:
    """Several of these at once."""
    layout = on_a_mesh(task)
    axes = {"data": layout.data, "pipeline": layout.pipeline, "tensor": layout.tensor}
    watch.note = " × ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
    with taking():
        mesh, module = md.mixed.mesh(layout.data, layout.pipeline, layout.tensor), task.make()
        model = md.mixed.MixedParallel(module, mesh, layout.micro_batches, plan=plan_of(module))
    optimizer = task.optimizer(model.parameters())
    replica = mesh.get_local_rank("data")
    for batch in task.batches():
        inputs, targets = (part[replica :: layout.data] for part in batch)
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
    System("ZeRO-1", partial(zero, stage=1), stage=1),
    System("ZeRO-2", partial(zero, stage=2), stage=2),
    System("FSDP", fully_sharded, stage=3),
    System("FSDP + checkpointing", partial(fully_sharded, checkpoints=True), stage=3),
    System("FSDP + offload", partial(fully_sharded, offloads=True), stage=3),
    System("pipeline", pipeline, layout=layers_in_turn),
    System("tensor", tensor, layout=features_apart),
    System("mixed", mixed, layout=on_a_mesh),
]
