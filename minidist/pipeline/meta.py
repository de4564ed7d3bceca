"""Stages of a model on the device "meta": each rank fills its own, with the values of one process.

Lesson: layer_splitting
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from minidist.collectives.peers import Peers
from minidist.common import agree
from minidist.common.materialize import materialize, places_of, tie_again
from minidist.pipeline.executor import Tie
from minidist.pipeline.instructions import Schedule


def fill(
    stages: Mapping[int, nn.Module],
    plan: Schedule,
    ties: Sequence[Tie],
    peers: Peers,
    device: torch.device,
    init: Callable[[nn.Module], object] | None,
) -> list[Tie]:
    """Fill this rank's stages, each when all before it are filled. Returns this rank's ties, with
    the parameters that they have become, and the values of the first rank that has each."""
    assert peers.group is not None
    places = places_of([named for stage in stages.values() for named in stage.named_modules()])
    for number in range(plan.stages):
        with agree.together(peers.group):
            if number in stages:
                materialize(list(stages[number].named_modules()), device, init)
        pass_on_random_state(peers.group, plan.rank_of(number), device)
    become = tie_again(places)
    mine = [
        replace(tie, parameter=become[tie.parameter]) for tie in ties if peers.rank in tie.ranks
    ]
    for tie in mine:
        values = tie.parameter.detach().reshape(-1)
        first, *others = tie.ranks
        if peers.rank == first:
            for other in others:
                peers.send(values, other)
        else:
            tie.parameter.data.copy_(peers.recv(values, first).view_as(tie.parameter))
    return mine


def pass_on_random_state(group: dist.ProcessGroup, source: int, device: torch.device) -> None:
    """Every rank of the group gets that of one, for the CPU and for the device."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    dist.broadcast_object_list(states, group=group, group_src=source)
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)
