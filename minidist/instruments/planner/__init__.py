"""What a model needs before anything runs: bytes a rank, and seconds a step. Lesson: zero.

    md.planner.memory(7.5e9, world_size=64, stage=2).total    # 16.6e9 bytes
    md.planner.largest_model(80e9, world_size=64, stage=3)    # 320e9 parameters

    model, gpu = md.planner.MODELS["llama-3-8b"], md.planner.GPUS["h100"]
    layout = md.planner.Layout(world_size=8, tensor=2, stage=1)
    md.planner.peak(model, layout).total                      # bytes of the fullest rank
    md.planner.step_time(model, layout, gpu).total            # seconds

`python -m minidist plan` prints it all, a layout that fits and is as fast as any, and each
number's source.

    experts = md.planner.Layout(world_size=64, experts=8)     # of MODELS["mixtral-8x7b"], say

    md.planner.young(save=60, between_failures=10_000)        # seconds between two checkpoints

To read: `model_states` (the formulas of ZeRO), `transformer` and `layout` (a model's shape, and how
it is laid out), `peak` (what a step adds), `device` and `step_time` (how long it takes), `advice`
(which layout to take), `page` and `plan_command` (both in words), `planned_messages` (each message
of a step), `failures` (how often to save).
"""

from minidist.instruments.planner.advice import layouts
from minidist.instruments.planner.device import GPUS, LATENCY_US, Device
from minidist.instruments.planner.failures import expected_time, run_with_failures, young
from minidist.instruments.planner.layout import CONTEXT_ATTENTION, CONTEXT_CUT, RECOMPUTE, Layout
from minidist.instruments.planner.model_states import (
    OPTIMIZERS,
    PRECISIONS,
    STAGES,
    Memory,
    Precision,
    largest_model,
    memory,
    smallest_world_size,
)
from minidist.instruments.planner.peak import layer_activations, peak
from minidist.instruments.planner.planned_messages import Planned, messages
from minidist.instruments.planner.step_time import StepTime, mfu, step_time, touched, traffic
from minidist.instruments.planner.transformer import MODELS, Transformer

__all__ = [
    "CONTEXT_ATTENTION",
    "CONTEXT_CUT",
    "GPUS",
    "LATENCY_US",
    "MODELS",
    "OPTIMIZERS",
    "PRECISIONS",
    "RECOMPUTE",
    "STAGES",
    "Device",
    "Layout",
    "Memory",
    "Planned",
    "Precision",
    "StepTime",
    "Transformer",
    "expected_time",
    "largest_model",
    "layer_activations",
    "layouts",
    "memory",
    "messages",
    "mfu",
    "peak",
    "run_with_failures",
    "smallest_world_size",
    "step_time",
    "touched",
    "traffic",
    "young",
]
