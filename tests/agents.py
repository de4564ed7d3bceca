"""torchrun as a program of its own, with all of its ranks."""

import random
import socket
import subprocess
import sys
from pathlib import Path

from programs import Family

FAR = 100  # seconds: on a busy machine four ranks import torch for long


def free_port() -> int:
    """Until it is used nobody gets it by chance: the system gives out those from 32768 on."""
    chance = random.SystemRandom()
    while True:
        port = chance.randrange(20_000, 32_000)
        with socket.socket() as one:
            try:
                one.bind(("", port))
            except OSError:
                continue
            return port


class Agent(Family):
    """A torchrun, or python, and all its ranks: `end()` kills them all, as a machine that fails.

    A rank has a session of its own, so killing the agent's process group would not reach it.
    """

    def __init__(self, folder: Path, *words: object, python: bool = False, **environ: str) -> None:
        super().__init__()
        self.log = folder / f"{self.tmp.name}.log"
        command = [] if python else ["-m", "torch.distributed.run"]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command, *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self.environ(), "OMP_NUM_THREADS": "1", **environ},
                cwd=folder,
                start_new_session=True,
            )

    def printed(self) -> str:
        return self.log.read_text(errors="replace")

    def finish(self, seconds: float = FAR) -> int:
        return self.process.wait(seconds)
