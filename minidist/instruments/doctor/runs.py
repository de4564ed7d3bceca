"""The script's processes: how they are started, awaited and ended."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minidist.instruments.doctor.witness import Job

GRACE = 15.0  # seconds that the last rank has when the first is ready
Started = subprocess.Popen[bytes]


@dataclass
class Process:
    """One that has ended, or stood still, and what it left."""

    who: str
    code: int | None  # None if it did not end by itself
    said: str
    steps: list[dict[str, Any]]
    forwards: int


@dataclass
class Runs:
    """words: the script, and its own arguments."""

    folder: Path
    words: list[str]
    steps: int
    seconds: float

    def ranks(self, world_size: int) -> list[Process]:
        jobs = [Job(str(self.folder), f"rank{r}", self.steps) for r in range(world_size)]
        return self._finish(jobs, self._start(jobs))

    def alone(self, jobs: list[Job]) -> list[Process]:
        """Processes that know nothing of each other."""
        return self._finish(jobs, [each for job in jobs for each in self._start([job])])

    def _start(self, jobs: list[Job]) -> list[Started]:
        """As torchrun would, on the CPU."""
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        told = f"""WORLD_SIZE={len(jobs)} LOCAL_WORLD_SIZE={len(jobs)} MASTER_ADDR=127.0.0.1
            MASTER_PORT={port} GROUP_RANK=0 GROUP_WORLD_SIZE=1 TORCHELASTIC_RUN_ID=doctor
            OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 ACCELERATE_USE_CPU=true"""
        environ = os.environ | dict(each.split("=") for each in told.split())
        environ |= {"TMPDIR": str(self.folder), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "minidist.instruments.doctor.witness", *self.words]
        started = []
        for rank, job in enumerate(jobs):
            own = environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | job.environ()
            with open(job.path("log"), "wb") as log:
                to: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                started.append(subprocess.Popen(command, **to, env=own, start_new_session=True))
        return started

    def _finish(self, jobs: list[Job], started: list[Started]) -> list[Process]:
        """Until all have come to the last step, or ended, or the time is up."""
        end = time.monotonic() + self.seconds
        try:
            while time.monotonic() < end:
                ready = [
                    job.path("done").exists() or process.poll() is not None
                    for job, process in zip(jobs, started, strict=True)
                ]
                if all(ready):
                    break
                if any(ready):
                    end = min(end, time.monotonic() + GRACE)
                time.sleep(0.02)
            codes = [process.poll() for process in started]
        finally:
            for process in started:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and all that it has started
                process.wait()
        return [self._left(job, code) for job, code in zip(jobs, codes, strict=True)]

    def _left(self, job: Job, code: int | None) -> Process:
        steps = [job.read(step) for step in range(1, self.steps + 1)]
        log = job.path("log").read_text(errors="replace").strip().splitlines()
        said = "\n".join([line for line in log if "<frozen " not in line][-5:])
        done = [step for step in steps if step]
        return Process(job.who, code, said, done, job.read("forwards") or 0)
