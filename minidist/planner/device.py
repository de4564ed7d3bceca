"""What a GPU can do, and how long a collective takes on many of them. Lesson: communication."""

from dataclasses import dataclass

from minidist.backend.link import Link
from minidist.collectives.cost import cost

REACHED = 0.8  # of a line's speed, by large messages of NCCL; the data sheet has the line's


@dataclass(frozen=True)
class Device:
    """A rank's processor: `flops`, its peak of operations a second in the precision of the training
    (dense, without sparsity), of which a step reaches `utilisation` while it computes; `memory` in
    bytes; `link` between ranks. A node of `per_node` ranks shares one cable, `link.inter`.

    Raises ValueError for numbers that make no sense.
    """

    flops: float
    memory: float
    link: Link
    per_node: int = 8
    utilisation: float = 1.0

    def __post_init__(self) -> None:
        if not (self.flops > 0 and self.memory > 0 and self.per_node >= 1):
            raise ValueError(
                "a device has more than 0 FLOP/s, memory and ranks a node, not "
                f"{self.flops}, {self.memory} and {self.per_node}"
            )
        if not 0 < self.utilisation <= 1:
            raise ValueError(f"utilisation is above 0 and 1 at most, not {self.utilisation}")

    def seconds(self, flops: float) -> float:
        return flops / (self.flops * self.utilisation)

    def ring(self, operation: str, ranks: int, nbytes: float, stride: int = 1) -> float:
        """Seconds of a collective of ranks 0, stride, 2 stride, …, by the formulas of
        `md.collectives.cost`, while all other such groups do the same. A ring goes through a node's
        cable once, but all the rings of a node share it."""
        inside = min(ranks, max(1, self.per_node // stride))  # of this ring, in one node
        alpha, beta = self._line(inside < ranks, self.per_node // inside)
        return cost(operation, "ring", ranks, nbytes).seconds(alpha, beta)

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


def _hgx(tflops: float, gb: float, nvlink: float, network: float, utilisation: float) -> Device:
    """Eight GPUs a node: NVLink in GB/s and one direction, a network card each in Gb/s."""
    inter = Link(8 * network * REACHED, latency_us=10)
    link = Link(8 * nvlink * REACHED, latency_us=3, inter=inter)
    return Device(tflops * 1e12, gb * 1e9, link, 8, utilisation)


GPUS = {  # NVIDIA's data sheets, SXM, 16 bits; HGX with HDR (A100) and NDR InfiniBand
    "a100": _hgx(312, 80, 300, 200, utilisation=0.62),
    "h100": _hgx(989, 80, 450, 400, utilisation=0.45),
    "h200": _hgx(989, 141, 450, 400, utilisation=0.45),
    "b200": _hgx(2250, 180, 900, 400, utilisation=0.40),
}
