"""An emulated network: messages that take as long as they would on a cable of that speed.

A rank has one way out, its egress. A message of n bytes occupies it for α + nβ seconds, and the
next one waits until it is free; so is the α-β model of lesson 2. The bytes themselves are in shared
memory at once. They may not be looked at before their time has come, and nobody burns a processor
while waiting for it: so what is computed meanwhile is as free as beside a real cable.
"""

import json
import os
import threading
import time
from dataclasses import asdict, dataclass

VARIABLE = "MINIDIST_LINK"


@dataclass(frozen=True)
class Link:
    """A network of so many gigabits a second, with so many microseconds of latency a message.

        md.ranks(4, backend="shm", link=md.Link(gbps=10, latency_us=20))
        md.ranks(4, backend="shm", nodes=2, link=md.Link(100, 5, inter=md.Link(10, 20)))

    `inter` is the link between ranks of different nodes, if it is another one. Raises ValueError
    for numbers that make no sense. Lesson 2.
    """

    gbps: float
    latency_us: float = 0.0
    inter: "Link | None" = None

    def __post_init__(self) -> None:
        if not self.gbps > 0 or not self.latency_us >= 0:
            raise ValueError(
                f"a link has more than 0 Gb/s, and 0 µs or more of latency, not {self.gbps} Gb/s "
                f"and {self.latency_us} µs"
            )
        if self.inter is not None and self.inter.inter is not None:
            raise ValueError("the link between nodes has no other link between nodes")

    def seconds(self, nbytes: float, messages: int = 1) -> float:
        """How long such messages take, of so many bytes together."""
        return messages * self.latency_us * 1e-6 + nbytes * 8 / (self.gbps * 1e9)

    @staticmethod
    def environ(link: "Link | None") -> dict[str, str]:
        """The variable that tells a rank which link to emulate, if any."""
        return {VARIABLE: json.dumps(link and asdict(link))}

    @classmethod
    def here(cls) -> "Link | None":
        """The link that this rank emulates."""
        told = json.loads(os.environ.get(VARIABLE, "null"))
        if told is None:
            return None
        inter = told.pop("inter")
        return cls(**told, inter=inter and cls(**inter))


class Egress:
    """The way out of this rank, shared by all its groups: free again at a time of
    time.monotonic."""

    def __init__(self) -> None:
        self._free = 0.0
        self._lock = threading.Lock()  # each group has a thread

    def leave(self, seconds: float) -> float:
        """Occupy it for so long, as soon as it is free; returns when the message is there."""
        with self._lock:
            self._free = max(time.monotonic(), self._free) + seconds
            return self._free

    def busy(self, due: float) -> None:
        """It is occupied until this time."""
        with self._lock:
            self._free = max(self._free, due)
