"""From a whole model to the stages of each rank.

Where it is cut: into stages of equal cost, as nearly as whole layers allow. What stages share: a
tied parameter. And where a model on the device "meta" gets its values.
"""

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist.collectives.peers import Peers, wait_for
from minidist.common.materialize import materialize, places_of, tie_again
from minidist.pipeline.equal_stages import balance
from minidist.pipeline.instructions import Schedule
from minidist.pipeline.schedules import find


def schedule_and_balance(
    module: nn.Sequential,
    microbatches: int,
    schedule: str | Schedule,
    balance: Sequence[int] | None,
    ranks: int,
) -> tuple[Schedule, list[int]]:
    """The schedule, and how many layers each stage takes. Raises if there can be none."""
    if getattr(type(module), "forward", None) is not nn.Sequential.forward:
        raise TypeError(f"Pipeline cuts an nn.Sequential, not {type(module).__name__}")
    schedule = find(schedule, ranks, microbatches, 2 * ranks if balance is None else len(balance))
    if balance is None:
        return schedule, balance_by_parameters(module, schedule.stages)
    if len(balance) != schedule.stages or min(balance) < 1 or sum(balance) != len(module):
        raise ValueError(
            f"balance {list(balance)} must share out {len(module)} layers over {schedule.stages} "
            f"stages, those of {schedule.name} on {ranks} ranks, at least 1 to each"
        )
    return schedule, list(balance)


# ---- stages of equal cost -------------------------------------------------------------------


def balance_by_parameters(module: nn.Sequential, stages: int) -> list[int]:
    """How many layers each stage takes, so that the largest stage has the fewest parameters.
    Raises ValueError if there are fewer layers than stages.

    Lesson: layer_splitting
    """
    return balance([sum(p.numel() for p in layer.parameters()) for layer in module], stages)


def balance_by_cost(
    module: nn.Sequential,
    example: torch.Tensor,
    stages: int,
) -> list[int]:
    """How many layers each stage takes, so that the slowest stage is as fast as can be.
    Lesson: layer_splitting

    Each layer's forward pass is timed on `example`, a micro-batch of inputs. Where there is a
    process group, all its ranks call this, and take the mean of their times: they must cut alike.
    Layers that are in training mode draw random numbers and update their buffers.
    """
    seconds, x = torch.zeros(len(module), dtype=torch.float64), example
    with torch.no_grad():
        for number, layer in enumerate(module):
            seconds[number] = median([_seconds(layer, x) for _ in range(5)])
            x = layer(x)
    if dist.is_available() and dist.is_initialized():
        times: list[torch.Tensor] = [seconds] * dist.get_world_size()
        dist.all_gather_object(times, seconds)
        seconds = torch.stack(times).mean(0)
    return balance(seconds.tolist(), stages)


def _seconds(layer: nn.Module, x: Any) -> float:
    start = time.perf_counter()
    layer(x)
    return time.perf_counter() - start


# ---- what stages share ----------------------------------------------------------------------

Ties = dict[nn.Parameter, list[int]]  # the ranks (within the group) that have it, in order


def find_ties(layers: Sequence[nn.Module], rank_of_layer: Sequence[int]) -> Ties:
    """The parameters that layers on different ranks share, in the order of the model."""
    ranks: dict[nn.Parameter, dict[int, None]] = {}
    for layer, rank in zip(layers, rank_of_layer, strict=True):
        for parameter in layer.parameters():
            ranks.setdefault(parameter, {})[rank] = None
    return {parameter: list(own) for parameter, own in ranks.items() if len(own) > 1}


# ---- a model on the device "meta" ----------------------------------------------------------------


def fill(
    stages: Mapping[int, nn.Module],
    plan: Schedule,
    ties: Ties,
    peers: Peers,
    device: torch.device,
) -> Ties:
    """Give this rank's stages memory and values, one stage after another over all ranks. Returns
    this rank's ties, now of the filled parameters. Each has the values of its first rank."""
    assert peers.group is not None
    places = places_of([named for stage in stages.values() for named in stage.named_modules()])
    for number in range(plan.stages):
        if number in stages:
            materialize(list(stages[number].named_modules()), device, None)
        state = [torch.get_rng_state()]
        dist.broadcast_object_list(state, group=peers.group, group_src=plan.rank_of(number))
        torch.set_rng_state(state[0])
    become = tie_again(places)
    mine = {become[tied]: ranks for tied, ranks in ties.items() if peers.rank in ranks}
    for parameter, (first, *others) in mine.items():
        values = parameter.detach().view(-1)
        if peers.rank == first:
            wait_for([peers.isend(values, other) for other in others])
        else:
            peers.recv(values, first)
    return mine
