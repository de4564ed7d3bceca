"""Experts: many networks, of which a token uses a few, shared out over ranks.

    for block in model.blocks:
        block.mlp = md.experts.MoE(32, 64, experts=12, k=2)
    md.experts.parallelize(model)                  # each rank keeps its experts
    model = md.DistributedDataParallel(model)      # which averages the rest

| of p ranks | who has it | who sums its gradient | divided by |
|---|---|---|---|
| what is shared | all | data parallelism, over all p | p |
| an expert | one of e, and its p / e replicas | the all_to_all over e, then the replicas | p |

Lesson: experts.

To read, in this order: `naive` is the idea, `router` chooses, `dispatch` brings rows to their
experts and back, `gradients` says what is summed over whom, `grouped` computes all experts of a
rank, `capacity` has a fixed number of places for rows, `balance` keeps experts evenly busy; `moe`
is the layer, and `parallelize` is for whole models.
"""

from minidist.experts.balance import imbalance, switch_loss, update_bias
from minidist.experts.dispatch import exchange
from minidist.experts.grouped import Experts, grouped_mm, loop, padded
from minidist.experts.moe import MoE
from minidist.experts.naive import NaiveExperts
from minidist.experts.parallelize import clip_grad_norm_, counted_elsewhere, parallelize, parameters
from minidist.experts.router import Router

__all__ = [
    "Experts",
    "MoE",
    "NaiveExperts",
    "Router",
    "clip_grad_norm_",
    "counted_elsewhere",
    "exchange",
    "grouped_mm",
    "imbalance",
    "loop",
    "padded",
    "parallelize",
    "parameters",
    "switch_loss",
    "update_bias",
]
