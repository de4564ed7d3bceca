"""What a GPU can do, and how long a collective takes on many of them. Lesson: hiding_gathers."""

import math
from dataclasses import dataclass, replace

from minidist.collectives.cost import cost
from minidist.instruments.link import Link

REACHED = 0.8  # of a line's speed, by large messages of NCCL; the data sheet has the line's
LATENCY_US = 3.4, 9.6  # in a node, and to others: NCCL, src/graph/tuning.cc, hwLat, Ring Simple


@dataclass(frozen=True)
class Device:
    """A rank's processor: `flops`, its peak of operations a second in 16 bits (dense, without
    sparsity), of which a step reaches `utilisation` while it computes; `memory` in bytes, which it
    reads or writes at `bandwidth` bytes a second; `link` between ranks. A node of `per_node` ranks
    shares one cable, `link.inter`.

    float8: how many times as fast linear layers are in 8 bits.
    attention: the part of `flops` that flash attention reaches; None is `utilisation`.

    Raises ValueError for numbers that make no sense.
    """

    flops: float
    memory: float
    link: Link
    per_node: int = 8
    utilisation: float = 1.0
    bandwidth: float = math.inf
    float8: float = 1.0
    attention: float | None = None

    def __post_init__(self) -> None:
        if not (self.flops > 0 and self.memory > 0 and self.bandwidth > 0 and self.per_node >= 1):
            raise ValueError(
                "a device has more than 0 FLOP/s, memory, bandwidth and ranks a node, not "
                f"{self.flops}, {self.memory}, {self.bandwidth} and {self.per_node}"
            )
        if not 0 < self.utilisation <= 1:
            raise ValueError(f"utilisation is above 0 and 1 at most, not {self.utilisation}")

    def seconds(self, flops: float) -> float:
        return flops / (self.flops * self.utilisation)

    def ring(self, operation: str, ranks: int, nbytes: float, stride: int = 1) -> float:
        """Seconds of a collective of ranks 0, stride, 2 stride, …, by the formulas of
        `md.collectives.cost`, while all other such groups do the same. A ring goes through a node's
        cable once, but all the rings of a node share it. A block has the latency of the cable on
        its way to each other node, that of a line within a node at all other steps, as in NCCL's
        own model (src/graph/tuning.cc)."""
        inside = min(ranks, max(1, self.per_node // stride))  # of this ring, in one node
        alpha, beta = self._line(inside < ranks, self.per_node // inside)
        if 1 < inside < ranks:
            within, leaving = self._line(False, 1)[0], (ranks / inside - 1) / (ranks - 1)
            alpha = leaving * alpha + (1 - leaving) * within
        return cost(operation, "ring", ranks, nbytes).seconds(alpha, beta)

    def collective(self, operation: str, ranks: int, nbytes: float, stride: int = 1) -> float:
        """The same of NCCL, which has two algorithms for an all_reduce: rings, and double binary
        trees over the nodes (Sanders, Speck and Träff, 2009), of fewer steps."""
        found = self.ring(operation, ranks, nbytes, stride)
        if operation != "all_reduce":
            return found
        inside = min(ranks, max(1, self.per_node // stride))
        alpha, beta = self._line(inside < ranks, self.per_node // inside)
        chain, hops = (inside - 1) * self._line(False, 1)[0], math.ceil(math.log2(ranks / inside))
        return min(found, 2 * (chain + hops * alpha + nbytes * beta))

    def exchange(self, ranks: int, nbytes: float, stride: int = 1) -> float:
        """Seconds of an all_to_all of `nbytes` a rank, which all other such groups do too: what is
        for other nodes goes through the cable, of every rank."""
        inside = min(ranks, max(1, self.per_node // stride))
        alpha, beta = self._line(inside < ranks, self.per_node)
        leaving = (ranks - (inside if inside < ranks else 1)) / ranks
        return (ranks - 1) * alpha + leaving * nbytes * beta

    def send(self, nbytes: float, stride: int, ranks: int) -> float:
        """Seconds of a message to the next of so many ranks, which all others send too."""
        alpha, beta = self._line(stride * ranks > self.per_node, min(stride, self.per_node))
        return alpha + nbytes * beta

    def _line(self, leaves: bool, sharing: int) -> tuple[float, float]:
        """Latency in seconds, and seconds a byte: of a line in a node, or of a share in its
        cable."""
        line = (self.link.inter or self.link) if leaves else self.link
        alpha = line.seconds(0)
        return alpha, (line.seconds(1) - alpha) * (sharing if leaves else 1)


def _hgx(
    tflops: float,
    gib: float,
    hbm: float,
    nvlink: float,
    network: float,
    utilisation: float,
    attention: float,
    float8: float = 1.0,
) -> Device:
    """Eight GPUs a node: memory in GiB and TB/s, NVLink in GB/s and one direction, a network card
    each in Gb/s."""
    here, there = LATENCY_US
    inter = Link(8 * network * REACHED, latency_us=there)
    link = Link(8 * nvlink * REACHED, latency_us=here, inter=inter)
    own = tflops * 1e12, gib * 2**30
    return Device(*own, link, 8, utilisation, hbm * 1e12, float8, attention)


# NVIDIA's data sheets, SXM; HGX with HDR (A100) and NDR InfiniBand. Of memory, what torch finds
# there. `utilisation` and `float8` are fitted to published steps (tests/test_published_runs.py).
# `attention` is FlashAttention-2's best: 230 TFLOP/s on A100, 335 on H100 (arXiv 2307.08691,
# section 4.1); for B200 the same part of its peak.
GPUS = {
    "a100": _hgx(312, 79.25, 2.04, 300, 200, utilisation=0.62, attention=0.74),
    "h100": _hgx(989, 79.11, 3.35, 450, 400, utilisation=0.65, attention=0.34, float8=1.5),
    "h200": _hgx(989, 139.80, 4.8, 450, 400, utilisation=0.65, attention=0.34, float8=1.5),
    "b200": _hgx(2250, 178.35, 8.0, 900, 400, utilisation=0.55, attention=0.34, float8=1.5),
}
# torchtitan's: 96 GB of HBM2e with 2.4 TB/s, limited to 500 W of 700, its page says.
GPUS["h100-500w"] = replace(
    GPUS["h100"], memory=96e9, bandwidth=2.4e12, utilisation=0.47, attention=0.34 * 5 / 7
)
