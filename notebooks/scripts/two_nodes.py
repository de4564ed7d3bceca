"""Two nodes under torchrun, on this machine; one is killed, and the other goes on. Run it by
`python two_nodes.py FOLDER`.

A node is a torchrun with two ranks, which train as train.py says. Lesson: surviving_failures.
"""

import csv
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil  # comes with Jupyter

SCRIPT = Path(__file__).resolve().with_name("train.py")
STEPS, EVERY, KILLED_AFTER = 60, 5, 22
LIMIT = 110  # seconds, for all of it


def start(folder: Path, port: int, host: bool) -> subprocess.Popen:
    """A node. `host`: whether it has the store at which the nodes meet."""
    wait = "last_call_timeout=2"  # seconds for another node to come, once there is one
    torchrun = [
        "--nnodes=1:2",  # one node can go on alone
        "--nproc-per-node=2",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}",
        f"--rdzv-conf=is_host={host},{wait},keep_alive_interval=1",
        "--local-addr=localhost",
        f"--log-dir={folder / 'logs'}",  # a killed torchrun leaves it behind
    ]
    words = ["--folder", folder, "--steps", STEPS, "--every", EVERY, "--pause", 0.03]
    # Without the variable torch 2.13 takes in no node that comes later.
    environ = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with open(folder / "torchrun.log", "a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *torchrun, SCRIPT, *map(str, words)],
            stdout=log,
            stderr=log,
            env={**os.environ, **environ},
        )


def kill(node: subprocess.Popen) -> None:
    """As a machine fails: kill -9 of torchrun and all its ranks."""
    if node.poll() is None:
        torchrun = psutil.Process(node.pid)
        for process in [torchrun, *torchrun.children(recursive=True)]:
            process.kill()
        node.wait()


def done(folder: Path) -> list[tuple[int, int]]:
    """Of each step that was done: its number, and how many ranks did it."""
    path = folder / "losses.csv"
    rows = csv.reader(path.read_text().splitlines()) if path.exists() else []
    return [(int(step), int(ranks)) for step, ranks, _ in rows]


def main(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    deadline = time.monotonic() + LIMIT
    nodes = [start(folder, port, host) for host in (True, False)]
    try:
        while not any(step >= KILLED_AFTER and ranks == 4 for step, ranks in done(folder)):
            assert time.monotonic() < deadline, (folder / "torchrun.log").read_text()
            time.sleep(0.02)
        kill(nodes[1])
        status = nodes[0].wait(deadline - time.monotonic())
        print("a node is killed; the other one ends with status", status)
    finally:
        for node in nodes:
            kill(node)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
