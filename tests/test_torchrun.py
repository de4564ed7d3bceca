"""The training script under torchrun: on two nodes, with nodes that die and nodes that come. Two
agents on this machine play two nodes. Lesson: surviving_failures

What torchrun does by itself, and with no line of ours, is in `make soak`.
"""

import os
import re
import runpy
import subprocess
import sys
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from agents import FAR, free_port
from programs import HERE, eventually, few
from torch.utils.data import TensorDataset

from minidist.course import zoo
from minidist.saving import Batches, Checkpoints, commit

SCRIPTS = HERE / "notebooks" / "scripts"
STEPS = 40  # an epoch and a bit, for 1,797 examples in batches of 48

pytestmark = [
    pytest.mark.timeout(280),
    pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="finds processes by /proc"),
    # Of a process alone: pytest puts its own filters before the library's.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def train(steps, *words):
    return [SCRIPTS / "train.py", "--folder", "run", "--steps", steps, "--every", 5, *words]


def node(nodes, port, *words):
    """One of so many nodes. (The waits are shorter than torchrun's own: 30 s, 5 s, 60 s.)"""
    conf = "last_call_timeout=3,keep_alive_interval=1,read_timeout=20"
    return [
        *(f"--nnodes={nodes}", "--nproc-per-node=2", "--max-restarts=3", "--local-addr=localhost"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", f"--rdzv-conf={conf}"),
        *words,
    ]


# ---- what a run did, and what it should have done -------------------------------------------


def parts():
    """What the script trains, in one process; and what it counts with."""
    script = runpy.run_path(str(SCRIPTS / "train.py"))
    images, labels = zoo.digits(dtype=torch.float64)
    model = zoo.mlp(64, 32, 10, dtype=torch.float64)
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        "data": Batches(TensorDataset(images, labels, torch.arange(1797)), script["BATCH"]),
        "seen": script["Seen"](1797, torch.device("cpu")),
    }


def alone(steps):
    """The same training by one process that takes whole batches: weights, each step's loss, and how
    often it had each example."""
    own, losses, counts = parts(), [], torch.zeros(1797, dtype=torch.int64)
    model, optimizer = own["model"], own["optimizer"]
    for _, (inputs, targets, numbers) in zip(range(steps), own["data"], strict=False):
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        counts += numbers.bincount(minlength=1797)
    return model.state_dict(), losses, counts


def lines(folder):
    """(step, world size, loss) of each step that was done, also of those done again."""
    path = folder / "run" / "losses.csv"
    found = path.read_text().splitlines() if path.exists() else []
    rows = [line.split(",") for line in found]
    return [(int(step), int(size), float(loss)) for step, size, loss in rows]


def world_sizes(folder):
    return [size for size, _ in groupby(size for _, size, _ in lines(folder))]


def steps_with(folder, world_size):
    return sum(size == world_size for _, size, _ in lines(folder))


def newest(folder):
    """The step of the newest checkpoint."""
    return max(commit.steps_in(folder / "run"), default=0) if lines(folder) else 0


def require_as_alone(folder, steps):
    """The run took each example when its turn came, never twice in an epoch, and ended with the
    weights, and went through the losses, of one process that nothing interrupted."""
    own, (weights, losses, counts) = parts(), alone(steps)
    with Checkpoints(folder / "run") as checkpoints:
        assert checkpoints.load(**own) == steps
    found = own["seen"].counts
    assert torch.equal(found, counts)  # (batch 150 has an example twice, of two epochs)
    epochs = 48 * steps // 1797
    assert set(found.tolist()) == {epochs, epochs + 1} and found.sum() == 48 * steps
    for name, weight in own["model"].state_dict().items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-12, atol=1e-12)
    for step, _, loss in lines(folder):  # also of steps that were done again
        assert abs(loss - losses[step - 1]) < 2e-6, step
    assert {step for step, _, _ in lines(folder)} == set(range(1, steps + 1))


def require_next_after_a_checkpoint(folder):
    """Where the number of ranks changes, steps since the last checkpoint are done again: there is
    one every 5 steps, and the newest may not have been whole yet."""
    done = lines(folder)
    for before, after in zip(done, done[1:], strict=False):
        went_on = after[0] == before[0] + 1
        again = after[0] % 5 == 1 and before[0] - 10 < after[0] <= before[0] + 1
        assert went_on or (again and after[1] != before[1]), (before, after)


# ---- the script, unchanged -------------------------------------------------------------------


@pytest.mark.parametrize("how", few(["python", "standalone", "nodes"], {"standalone"}))
def test_the_script_is_the_same_everywhere(start, tmp_path, how):
    script = train(STEPS)
    if how == "python":
        agents = [start(*script, python=True)]
    elif how == "standalone":
        agents = [start("--standalone", "--nproc-per-node=2", *script)]
    else:
        meet = ["--master-addr=127.0.0.1", f"--master-port={free_port()}", "--nproc-per-node=2"]
        agents = [start("--nnodes=2", f"--node-rank={i}", *meet, *script) for i in range(2)]
    assert [agent.finish() for agent in agents] == [0] * len(agents), agents[0].printed()
    assert world_sizes(tmp_path) == [{"python": 2, "standalone": 2, "nodes": 4}[how]]
    require_as_alone(tmp_path, STEPS)
    assert all(agent.gone_within(20) for agent in agents)


FAILS = """
import torch, torch.distributed as dist
import minidist as md

def train():
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        raise ValueError("a mistake")
    dist.all_reduce(torch.ones(1))

md.launch(train)
"""


def test_a_rank_that_fails_ends_all_and_is_named(start, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    agent = start("--standalone", "--nproc-per-node=2", script)
    assert agent.finish() != 0 and agent.gone_within(20)
    assert re.search(r"^\[rank1\]: ValueError: a mistake$", agent.printed(), re.MULTILINE)
    assert re.search(r"rank 1 has left|rank 1 has died", agent.printed()), agent.printed()


# ---- nodes that die, and nodes that come ----------------------------------------------------


@pytest.mark.soak
def test_a_node_dies_and_another_comes(start, tmp_path):
    """Four ranks, then two, then four: the loss goes on, and no example is lost or repeated."""
    # Without it, torch 2.13 cannot take in a node: an agent that stays does not say again where
    # its store is.
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    words = node("1:2", free_port(), *train(5 * STEPS, "--pause", 0.1))
    first = start(*words, **environ)
    assert eventually(lambda: hosts_the_store(first), FAR)
    second = start(*words, **environ)
    assert eventually(lambda: steps_with(tmp_path, 4) > 12, FAR), first.printed()
    second.end()
    assert eventually(lambda: steps_with(tmp_path, 2) > 3, FAR), first.printed()
    third = start(*words, **environ)
    assert (first.finish(), third.finish()) == (0, 0), first.printed() + third.printed()
    assert world_sizes(tmp_path)[-3:] == [4, 2, 4]  # before, the first may be alone for a moment
    require_next_after_a_checkpoint(tmp_path)
    require_as_alone(tmp_path, 5 * STEPS)


@pytest.mark.soak
def test_the_node_with_the_store_dies(start, tmp_path):
    """Then the others end as well. Started again, with other ranks, the run goes on."""
    words = node("2", free_port(), *train(2 * STEPS, "--pause", 0.1))
    store = start(*words)
    assert eventually(lambda: hosts_the_store(store), FAR)
    other = start(*words)
    assert eventually(lambda: steps_with(tmp_path, 4) > 12, FAR), other.printed()
    store.end()
    assert other.finish() != 0
    assert "RendezvousConnectionError: The connection to the C10d store has failed" in (
        other.printed()
    )
    assert other.gone_within(20)
    again = start("--standalone", "--nproc-per-node=3", *train(2 * STEPS))
    assert again.finish() == 0, again.printed()
    assert world_sizes(tmp_path) == [4, 3]
    require_next_after_a_checkpoint(tmp_path)
    require_as_alone(tmp_path, 2 * STEPS)


def hosts_the_store(agent):
    """Whether the process that we started listens at the port of the rendezvous."""
    port = re.search(r"localhost:(\d+)", " ".join(agent.process.args))[1]
    rows = [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    rows += [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {row[9] for row in rows if row[3] == "0A" and row[1].endswith(f":{int(port):04X}")}
    held = set()
    for descriptor in Path(f"/proc/{agent.process.pid}/fd").glob("*"):
        with suppress(FileNotFoundError):  # closed meanwhile
            held.add(os.readlink(descriptor))
    return any(f"socket:[{inode}]" in held for inode in inodes)


# ---- Slurm and ssh ---------------------------------------------------------------------------

SHELL = sorted(SCRIPTS.glob("*.s[hl]*"))


def test_shellcheck_finds_nothing():
    subprocess.run([f"{sys.prefix}/bin/shellcheck", *SHELL], check=True, timeout=60)


@pytest.mark.soak
def test_over_ssh_starts_every_node(tmp_path, start):
    """With a command in the place of ssh that runs its words on this machine."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nshift\nexec bash -c "$*"\n')
    ssh.chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NODES": "127.0.0.1 localhost",
        "RANKS_PER_NODE": "2",
        "PORT": str(free_port()),
        "PROJECT": str(tmp_path),
        "SCRIPT": str(SCRIPTS / "train.py"),
    }
    run = f"import os; os.execvp('bash', ['bash', '{SCRIPTS}/train_over_ssh.sh', *{ARGUMENTS}])"
    agent = start("-c", run, python=True, **environ)
    assert agent.finish() == 0, agent.printed()
    assert world_sizes(tmp_path) == [4]
    require_as_alone(tmp_path, STEPS)


ARGUMENTS = ["--folder", "run", "--steps", str(STEPS)]
