"""Lesson 12: what a model needs before anything runs: bytes a rank, and seconds a step.

    md.planner.memory(7.5e9, world_size=64, stage=2).total    # 16.6e9 bytes
    md.planner.largest_model(80e9, world_size=64, stage=3)    # 320e9 parameters
    machine = md.planner.calibrate(ranks)                     # a small run, on a pool
    md.planner.step_time(7.5e9, 64, 2, tokens=2048, machine=machine).total

Stages are those of ZeRO: 0 is DDP (lesson 4), 1 and 2 share out the optimizer states and the
gradients (lesson 8), 3 also the parameters (lesson 9). `python -m minidist plan` prints it all.

To read: `states` (parameters, gradients, optimizer states), `transformer` (activations), `speed`
(the time of a step), `report` (the tables).
"""

from minidist.planner.speed import Machine, StepTime, calibrate, step_time, traffic
from minidist.planner.states import (
    OPTIMIZERS,
    PRECISIONS,
    STAGES,
    Memory,
    Precision,
    largest_model,
    memory,
    smallest_world_size,
)
from minidist.planner.transformer import RECOMPUTE, Transformer

__all__ = [
    "OPTIMIZERS",
    "PRECISIONS",
    "RECOMPUTE",
    "STAGES",
    "Machine",
    "Memory",
    "Precision",
    "StepTime",
    "Transformer",
    "calibrate",
    "largest_model",
    "memory",
    "smallest_world_size",
    "step_time",
    "traffic",
]
