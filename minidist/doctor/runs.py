"""The script's processes: how they are started, awaited and ended."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minidist.doctor.witness import Job

GRACE = 15.0  # seconds that the last rank has when the first is ready


@dataclass
class Process:
    """One that has ended, or stood still: what it left."""

    job: Job
    code: int | None  # None if it did not end by itself
    said: str
    steps: list[dict[str, Any]]
    forwards: int


@dataclass
class Runs:
    """words: the script, and its own arguments. cuda: whether it may see GPUs."""

    folder: Path
    words: list[str]
    steps: int
    seconds: float
    cuda: bool = False

    def ranks(self, world_size: int) -> list[Process]:
        jobs = [Job(str(self.folder), f"rank{r}", self.steps) for r in range(world_size)]
        return self._finish(jobs, self._start(jobs))

    def alone(self, jobs: list[Job]) -> list[Process]:
        """Processes that know nothing of each other."""
        return self._finish(jobs, [each for job in jobs for each in self._start([job])])

    def _start(self, jobs: list[Job]) -> list[subprocess.Popen[bytes]]:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        shared = {
            **{"WORLD_SIZE": len(jobs), "LOCAL_WORLD_SIZE": len(jobs), "OMP_NUM_THREADS": 1},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TMPDIR": self.folder},
            **{"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "TORCHELASTIC_RUN_ID": "doctor"},
            **{"TORCHDYNAMO_DISABLE": 1, "ACCELERATE_USE_CPU": "true"},
        }
        if not self.cuda:
            shared["CUDA_VISIBLE_DEVICES"] = ""
        started = []
        for rank, job in enumerate(jobs):
            own = {**shared, "RANK": rank, "LOCAL_RANK": rank} | job.environ()
            with open(job.path(job.who, "log"), "wb") as log:
                started.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "minidist.doctor.witness", *self.words],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=os.environ | {key: str(value) for key, value in own.items()},
                        start_new_session=True,
                    )
                )
        return started

    def _finish(self, jobs: list[Job], started: list[subprocess.Popen[bytes]]) -> list[Process]:
        """Until all have come to the last step, or ended, or the time is up."""

        def ready(job: Job, process: subprocess.Popen[bytes]) -> bool:
            stands = any(job.path(job.who, why).exists() for why in ("done", "hungry"))
            return stands or process.poll() is not None

        end = time.monotonic() + self.seconds
        try:
            while time.monotonic() < end:
                are = [ready(*each) for each in zip(jobs, started, strict=True)]
                if all(are):
                    break
                if any(are):
                    end = min(end, time.monotonic() + GRACE)
                time.sleep(0.02)
            codes = [process.poll() for process in started]
        finally:
            for process in started:
                _kill(process)
        return [self._left(job, code) for job, code in zip(jobs, codes, strict=True)]

    def _left(self, job: Job, code: int | None) -> Process:
        paths = [job.path(job.who, step) for step in range(1, self.steps + 1)]
        steps = [torch.load(path, weights_only=False) for path in paths if path.exists()]
        log = job.path(job.who, "log").read_text(errors="replace").strip().splitlines()
        said = "\n".join([line for line in log if "<frozen " not in line][-5:])
        passes = job.path(job.who, "forwards")
        forwards = torch.load(passes) if passes.exists() else 0
        return Process(job, code, said, steps, forwards)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """And all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
