"""The puzzles and the exercise of the lesson parameter_server."""

from random import Random
from typing import Any

import torch
from torch import nn

from minidist.course.checks.verdict import NoTry, check, puzzle, require_right, same, shown
from minidist.parameter_server.server import Server

slow_one = puzzle(__name__, "slow_one")
bounded = puzzle(__name__, "bounded")

TRAINERS = 2, 3, 5


@check
def server(answer: object) -> None:
    """`BoundedServer(parameters, optimizer, trainers, bound)`: it steps by each gradient, and says
    who may go on."""
    if not isinstance(answer, type):
        raise NoTry(f"give the class itself, not {shown(answer)}.")
    require_right(_trial, answer, world_size=1, of_rank="")


def _trial(given: Any) -> str:
    """What is wrong with it, if anything."""
    for bound in 0, 1, 3:
        if said := _run(given, bound):
            return f"with bound {bound}, {said}"
    return ""


def _run(given: Any, bound: int) -> str:
    random, draw = Random(bound), torch.Generator().manual_seed(bound)
    ours, theirs = (
        [nn.Parameter(torch.ones(2, 3).double()), nn.Parameter(torch.ones(4).double())]
        for _ in range(2)
    )

    def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    right = Server(ours, momentum(ours), TRAINERS, False, bound)
    found = given(theirs, momentum(theirs), TRAINERS, bound)
    there, pulled = list(TRAINERS), dict.fromkeys(TRAINERS, 0)
    for event in range(40):
        able = [who for who in there if right.may_go_on(who)]
        who = random.choice(able)
        if event in (20, 30):  # the slowest may leave
            who = min(there, key=right.steps.__getitem__)
            there.remove(who)
            right.leave(who)
            found.leave(who)
            said = f"after trainer {who} has left, "
        else:
            gradients = [torch.randn(p.shape, generator=draw).double() for p in ours]
            late, pulled_at = right.version - pulled[who], pulled[who]
            right.step([*gradients])
            right.steps[who] += 1
            stale = found.push(who, pulled_at, [each.clone() for each in gradients])
            pulled[who] = right.version
            said = f"after push {right.version}, of trainer {who}, "
            if stale != late or isinstance(stale, bool):
                return f"{said}the staleness is {late}, not {shown(stale)}"
            if not same([p.detach() for p in theirs], [p.detach() for p in ours]):
                return f"{said}the weights are not those of the optimizer's step"
            if found.updates != right.version:
                return f"{said}`updates` is {shown(found.updates)}"
        for other in there:
            free, go = right.may_go_on(other), found.may_go_on(other)
            if go is not free:
                counts = ", ".join(f"{name}: {right.steps[name]}" for name in there)
                return (
                    f"{said}trainer {other} may {'' if free else 'not '}go on, and may_go_on says "
                    f"{shown(go)} (pushes of those that are there: {counts})"
                )
    return ""
