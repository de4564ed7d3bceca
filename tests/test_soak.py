"""What shows only after hundreds of times: `make soak` runs these, `make test` does not.

Other long forms stand beside their short ones and carry the same marker: `grep -rn soak tests`.
"""

import os
import random
import re
import signal
import threading
import time
from pathlib import Path

import cloudpickle
import pytest
import test_shm
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from programs import SEED, Program

import minidist as md

SOON = 5  # seconds

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="finds processes by /proc"),
]


# ---- kill -9 at any moment of a training run ----------------------------------------------

TRAINING = """
import os
import minidist as md, torch, torch.distributed as dist

def train():
    model = md.DistributedDataParallel(torch.nn.Linear(300, 300), bucket_cap_mb=0.1)
    optimizer = md.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
    while True:
        optimizer.zero_grad()
        model(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()

r = md.ranks(3, backend=BACKEND)
print(*r(os.getpid), flush=True)
r(train)
"""


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_hundred_programs_killed_as_they_train_leave_nothing(backend, tmp_path):
    """Each turn kills the program, or one of its ranks, of which the program then dies."""
    moments = random.Random(SEED + backend)
    for turn in range(100):
        folder = tmp_path / str(turn)
        folder.mkdir()
        with Program(TRAINING.replace("BACKEND", repr(backend)), folder) as program:
            ranks = [int(pid) for pid in program.line().split()]
            victim = moments.choice([program.process.pid] * 3 + ranks)
            time.sleep(moments.uniform(0, 0.5))
            os.kill(victim, signal.SIGKILL)
            code, _, err = program.finish(30)
            assert code == -signal.SIGKILL if victim not in ranks else code == 1, err
            assert f"RankError: rank {ranks.index(victim)} was" in err if code == 1 else err == ""
            assert program.gone_within(SOON)
            assert program.temporary() == []
            pids = {program.process.pid, *ranks}
            names = os.listdir("/dev/shm")
            assert not [name for name in names if pids & set(map(int, re.findall(r"\d+", name)))]


def train():
    """DDP and its optimizer, without end."""
    model = md.DistributedDataParallel(torch.nn.Linear(300, 300), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    while True:
        optimizer.zero_grad()
        model(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_pool_outlives_two_hundred_killed_ranks(backend):
    moments = random.Random(SEED + backend)

    def held():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with md.ranks(3, backend=backend) as pool:
        pool(dist.get_rank)
        before = held()
        for _ in range(200):
            victim, pids = moments.randrange(3), pool(os.getpid)
            later = threading.Timer(
                moments.uniform(0, 0.3), os.kill, (pids[victim], signal.SIGKILL)
            )
            later.start()
            with pytest.raises(md.RankError) as raised:
                pool(train)
            later.join()
            assert raised.value.rank == victim and "killed by SIGKILL" in str(raised.value)
            assert pool(dist.get_rank) == [0, 1, 2]
            assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert held() == before


# ---- any sequence of calls, on any groups -------------------------------------------------


@pytest.fixture(scope="module")
def four():
    cloudpickle.register_pickle_by_value(test_shm)
    with md.ranks(4, backend="shm", timeout=20) as pool:
        yield pool


@test_shm.sequences(max_examples=200)
@given(steps=st.lists(test_shm.STEPS, min_size=60, max_size=70))
def test_two_hundred_sequences_of_collectives_leave_what_gloo_leaves(four, steps):
    assert four(test_shm.sequence, steps) == [[]] * 4
