"""Replicas that come and go: one is killed in a step, and joins again. Run it by `python heal.py`.

Each replica is a process with a whole model. Those that are there form a group, and average their
gradients. A step counts only if every one of them has the mean: if one dies before, the others keep
their weights, form a group without it, and do the step again. A replica that joins takes the
weights and the optimizer's states of another one.
"""

import os
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F

import __main__
import minidist as md

REPLICAS, STEPS = 3, 8
KILLED, DIES_IN, JOINS_BEFORE = 1, 2, 5  # which replica, and the steps


def batch(step, replicas):
    """The examples of some replicas: each has others, in every step."""
    images, labels = md.zoo.digits(torch.float64)
    picks = [REPLICAS * (16 * step + i) + replica for replica in replicas for i in range(16)]
    return images[picks], labels[picks]


class Replica:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = md.zoo.mlp(64, 32, 10).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def state(self):
        return self.model.state_dict(), self.optimizer.state_dict()

    def gradients(self, step, replicas):
        self.optimizer.zero_grad()
        inputs, targets = batch(step, replicas)
        F.cross_entropy(self.model(inputs), targets).backward()
        return [parameter.grad for parameter in self.model.parameters()]


# ---- what a replica is called for; in a pool of one rank, __main__ keeps what it has -------------


def begin(seed):
    __main__.replica = Replica(seed)


def read():
    return __main__.replica.state()


def heal(state):
    weights, optimizer = state
    __main__.replica.model.load_state_dict(weights)
    __main__.replica.optimizer.load_state_dict(optimizer)


def meet(number, file, there):
    store, seconds = dist.FileStore(file, len(there)), timedelta(seconds=10)
    group = dist.ProcessGroupGloo(store, there.index(number), len(there), seconds)
    __main__.number, __main__.group = number, group


def average(number, step, killed):
    """Whether this replica has the mean gradient."""
    gradients = __main__.replica.gradients(step, [number])
    if number == killed:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for gradient in gradients:
            __main__.group.allreduce([gradient]).wait()
            gradient /= __main__.group.size()
    except RuntimeError:  # another one has died
        return False
    return True


def commit(number):
    __main__.replica.optimizer.step()


# ---- who is there, and what they do --------------------------------------------------------------


def call(pools, there, function, *args):
    """Call replicas at the same time: the answers, by their numbers, of those that are alive."""

    def call_one(number):
        try:
            return pools[number](function, number, *args)[0]
        except md.RankError:  # its pool starts a new process at the next call
            return "died"

    with ThreadPoolExecutor(len(there)) as threads:
        return dict(zip(there, threads.map(call_one, there), strict=True))


def train(pools, folder):
    there, joining, quorum, counted = list(range(REPLICAS)), list(range(1, REPLICAS)), 0, []
    for number in there:
        pools[number](begin, number)  # each has other weights
    while len(counted) < STEPS:
        step, again = len(counted), KILLED not in there
        if step == JOINS_BEFORE and again:
            there, joining = sorted([*there, KILLED]), [KILLED]
            pools[KILLED](begin, KILLED)
        for number in joining:
            source = min(set(there) - set(joining))
            pools[number](heal, pools[source](read)[0])
            print(f"step {step}: replica {number} has the state of {source}")
        joining, quorum = [], quorum + 1
        call(pools, there, meet, f"{folder}/{quorum}", there)
        killed = KILLED if step == DIES_IN and not again else None
        answers = call(pools, there, average, step, killed)
        if all(answer is True for answer in answers.values()):
            call(pools, there, commit)
            counted.append(there)
            print(f"step {step}: the mean of replicas {there}")
        else:
            there = [number for number, answer in answers.items() if answer != "died"]
            print(f"step {step}: one has died and nobody steps; left are {there}")
    return counted, [pools[number](read)[0][0] for number in there]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        pools = [md.ranks(1, "gloo") for _ in range(REPLICAS)]
        try:
            counted, weights = train(pools, folder)
        finally:
            for pool in pools:
                pool.close()
    alone = Replica(0)
    for step, there in enumerate(counted):
        alone.gradients(step, there)
        alone.optimizer.step()
    differences = [
        md.parity.relative_difference(each[name], wanted)
        for each in weights
        for name, wanted in alone.model.state_dict().items()
    ]
    assert max(differences) < 1e-12
    print(f"{len(weights)} replicas are equal to one process that saw the same batches")
