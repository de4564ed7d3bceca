"""What is measured of a training on one rank: time, bytes, memory and the loss."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import minidist as md
from minidist.collectives.cost import ALGORITHMS, total
from minidist.instruments.measure.storages import storages

State = dict[str, torch.Tensor]
COUNTED = 2  # the third step is counted: by then optimizer states and buckets are there
WARM = COUNTED + 2  # steps that are not timed: up to the one after it
HOST = "on the host"
ENDLESS = 1 << 60


@dataclass
class Watch:
    """A rank's record of a training: plain data. Lesson: real_tools."""

    counts: bool = True  # whether memory and bytes are counted
    seconds: list[float] = field(default_factory=list)  # of each step
    losses: list[float] = field(default_factory=list)  # of each step, on ranks that know it
    memory: dict[str, int] = field(default_factory=dict)  # {category: bytes} at the peak of a step
    sent: float = 0.0  # bytes in a step
    note: str = ""  # what a system says of itself

    @contextmanager
    def step(self, module: nn.Module, optimizer: Any) -> Iterator[None]:
        """All that one step does is within this block."""
        if not (self.counts and len(self.seconds) == COUNTED):
            start = time.perf_counter()
            yield
            self.seconds.append(time.perf_counter() - start)
            return
        budget = md.offload.Budget(ENDLESS, module, optimizer)  # it leaves the host's out
        with budget as memory, md.measure.TrafficCounter() as traffic:
            yield
        self.seconds.append(0.0)
        self.memory, self.sent = at_peak(memory), sent(traffic)
        if host := on_host(optimizer):
            self.memory[HOST] = host

    def loss(self, loss: torch.Tensor | float) -> None:
        """That of the step: of this rank's rows, or of all."""
        self.losses.append(loss.item() if isinstance(loss, torch.Tensor) else loss)


def at_peak(memory: md.measure.MemoryTracker) -> dict[str, int]:
    """{category: bytes} at the moment when most bytes lived."""
    moment = max(zip(*memory.history.values(), strict=True), key=sum)
    return {kind: live for kind, live in zip(memory.history, moment, strict=True) if live}


def on_host(optimizer: Any) -> int:
    """Bytes of an offloaded optimizer: its states, and its copies of the parameters."""
    held = dict(getattr(optimizer, "state", {})), getattr(optimizer, "shards", [])
    different = {s._cdata: s for s in storages(held) if getattr(s, "on_host", False)}
    return sum(storage.nbytes() for storage in different.values())


def sent(traffic: md.measure.TrafficCounter) -> float:
    """Bytes that the rank sent. Of a collective that a backend runs as a whole it is this rank's
    part of what all ranks of the group send, with a ring, or a tree."""
    nbytes = float(traffic.sent_bytes)
    for ranks, operations in traffic.by_group.items():
        for operation, (_, whole) in operations.items():
            name = operation.removesuffix("_coalesced")
            if operation in traffic.calls and name in ALGORITHMS:
                nbytes += total(name, ALGORITHMS[name][0], len(ranks), whole, 1).nbytes / len(ranks)
    return nbytes
