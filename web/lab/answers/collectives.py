"""The room "Collectives": who sends which pieces to whom at each step, and how long that takes.

`messages` writes down what the loops of `minidist.collectives.algorithms`, which need torch, send.
What a collective costs by formula is `minidist.collectives.cost`; when a message arrives is for the
network of `minidist.instruments.link` to say.
"""

from itertools import chain
from typing import Any, NamedTuple

from minidist.collectives.cost import ALGORITHMS, Cost, cost, sent
from minidist.instruments.link import Link, steps
from minidist.instruments.link.lines import Lines
from minidist.instruments.link.link import Network

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
COLLECTIVES = [f"{each} {algorithm}" for each in OPERATIONS for algorithm in ALGORITHMS[each]]
KEPT = ("all_gather", "broadcast")  # nothing is added
SIZES = [digit * 10**zeros for zeros in range(3, 10) for digit in (1, 2, 5)][:-2]  # 1 kB to 1 GB
ITEM = 4  # bytes of an element: float32


class Message(NamedTuple):
    """Some pieces of the vector, from one rank to another. The receiver adds them to its own, or
    keeps them in their place."""

    sender: int
    receiver: int
    pieces: range
    adds: bool


class Cluster(NamedTuple):
    """Ranks on nodes, and what joins them: lines within a node, and each node's cable to others."""

    node_of: list[int]
    link: Link

    @classmethod
    def of(cls, asked: dict[str, Any]) -> "Cluster":
        """The one that is asked for. ValueError if the nodes cannot have as many ranks each."""
        p, nodes = asked["ranks"], asked["nodes"]
        if p % nodes:
            raise ValueError(f"{p} ranks cannot be spread evenly over {nodes} nodes")
        cable = Link(asked["cable_gbps"], asked["cable_latency_us"])
        link = Link(asked["gbps"], asked["latency_us"], inter=cable)
        return cls([rank * nodes // p for rank in range(p)], link)

    def crosses(self, message: Message) -> bool:
        """Whether it goes over the cables."""
        return self.node_of[message.sender] != self.node_of[message.receiver]

    def formula(self, path: Cost) -> float:
        """The seconds of a critical path, as if, with several nodes, all of it went over cables."""
        link = self.link.inter if self.link.inter and self.node_of[-1] else self.link
        return link.seconds(path.nbytes, path.messages)


Step = list[Message]  # messages that do not wait for one another
Held = list[list[set[int]]]  # by rank and piece: the ranks whose values are in it


def choices() -> dict[str, Any]:
    """What there is to choose from."""
    return {"collectives": COLLECTIVES, "sizes": SIZES}


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """One step of a collective, and what it and its rivals cost. ValueError for what cannot be."""
    if asked["collective"] not in COLLECTIVES:
        raise ValueError(f"there is no collective {asked['collective']!r} here")
    operation, algorithm = asked["collective"].split()
    p, nbytes, cluster = asked["ranks"], asked["nbytes"], Cluster.of(asked)
    made, sizes = messages(operation, algorithm, p), piece_sizes(algorithm, p, nbytes)
    ends, step = times(made, sizes, cluster), min(asked["step"], len(made))
    names = ALGORITHMS[operation]
    return {
        **({"set": {"step": step}} if step < asked["step"] else {}),
        "operation": operation,
        "algorithm": algorithm,
        "node_of": cluster.node_of,
        "pieces": sizes,
        "steps": len(made),
        "step": step,
        "messages": [
            m._asdict()
            | {"pieces": [*m.pieces], "nbytes": size_of(m, sizes), "crosses": cluster.crosses(m)}
            for m in (made[step - 1] if step else [])
        ],
        "held": [
            [sorted(each) for each in rank] for rank in held(operation, made[:step], p, sizes)
        ],
        "complete": 1 if operation in KEPT else p,
        "ends": ends,
        "sent": [sent(operation, algorithm, p, r, nbytes // ITEM, ITEM).nbytes for r in range(p)],
        "rivals": [{"name": name} | costs(operation, name, nbytes, cluster) for name in names],
        "sizes": SIZES,
        "curves": {
            name: [cluster.formula(cost(operation, name, p, size)) for size in SIZES]
            for name in names
        },
    }


# ---- which messages, and what they bring ---------------------------------------------------------


def messages(operation: str, algorithm: str, p: int) -> list[Step]:
    """All messages of a collective of p ranks, step by step. The root, if it has one, is rank 0."""
    tree = steps.tree(p, 0, root=0)
    flat = [[message] for step in steps.flat(p, 0, root=0) for message in step]
    match operation, algorithm:
        case "broadcast", "tree":
            return _whole(tree, adds=False)
        case "broadcast", "flat":
            return _whole(flat, adds=False)
        case "reduce", "tree":
            return _whole(steps.back(tree), adds=True)
        case "reduce", "flat":
            return _whole(steps.back(flat[::-1]), adds=True)
        case "reduce_scatter", "ring":
            return _ring(p, adds=True)
        case "all_gather", "ring":
            return _ring(p, adds=False)
        case "all_reduce", "ring":
            return _ring(p, adds=True) + _ring(p, adds=False)
        case "all_reduce", "tree":
            return messages("reduce", "tree", p) + messages("broadcast", "tree", p)
        case "all_reduce", "naive":
            return messages("reduce", "flat", p) + messages("broadcast", "flat", p)
        case "all_reduce", "recursive_doubling":
            return _fold(p, range(1), _doubling(_core(p)))
        case _:
            return _fold(p, range(_core(p)), _halving_doubling(_core(p)))


def piece_sizes(algorithm: str, p: int, nbytes: int) -> list[int]:
    """The bytes of each piece into which an algorithm cuts the vector. As in `torch.tensor_split`,
    the first ones may have an element more."""
    pieces = {"ring": p, "halving_doubling": _core(p)}.get(algorithm, 1)
    numel = nbytes // ITEM
    return [ITEM * (numel // pieces + (i < numel % pieces)) for i in range(pieces)]


def size_of(message: Message, sizes: list[int]) -> int:
    """The bytes of a message, by those of the pieces."""
    return sum(sizes[i] for i in message.pieces)


def held(operation: str, done: list[Step], p: int, sizes: list[int]) -> Held:
    """Whose values are in each piece of each rank after these steps."""

    def begins_with(rank: int, piece: int) -> bool:
        return {"all_gather": rank == piece, "broadcast": rank == 0}.get(operation, True)

    now: Held = [
        [{rank} if begins_with(rank, i) else set() for i in range(len(sizes))] for rank in range(p)
    ]
    for step in done:
        before = [list(rank) for rank in now]
        for sender, receiver, pieces, adds in step:
            for i in pieces:
                new = before[sender][i]
                now[receiver][i] = now[receiver][i] | new if adds else new
    return now


def _whole(found: list[steps.Step], adds: bool) -> list[Step]:
    """The library's messages, each of the whole vector."""
    return [[Message(r, other, range(1), adds) for r, other, _ in step] for step in found]


def _ring(p: int, adds: bool) -> list[Step]:
    """One round: of partial sums, after which rank r has all of piece r; or of pieces that are
    complete, of which rank r sends piece r first."""
    found = []
    for s, step in enumerate(steps.ring(p, 0)):
        at = [(r - adds - s) % p for r in range(p)]
        found.append([Message(r, other, range(at[r], at[r] + 1), adds) for r, other, _ in step])
    return found


def _doubling(core: int) -> list[Step]:
    """Partners exchange whole vectors and add."""
    return [[Message(r, r ^ d, range(1), True) for r in range(core)] for d in _powers(core)]


def _halving_doubling(core: int) -> list[Step]:
    """Partners exchange halves of what they still add up, until each has a piece; then what is
    complete, the same way back."""

    def half(rank: int, d: int) -> range:
        """The d pieces among which the rank's own one lies."""
        return range(rank & -d, (rank & -d) + d)

    ranks, distances = range(core), _powers(core)
    halving = [[Message(r, r ^ d, half(r ^ d, d), True) for r in ranks] for d in distances[::-1]]
    return halving + [[Message(r, r ^ d, half(r, d), False) for r in ranks] for d in distances]


def _fold(p: int, whole: range, inner: list[Step]) -> list[Step]:
    """The ranks beyond the largest power of two give their vectors to twins within it, and get the
    result back from them."""
    core = _core(p)
    if core == p:
        return inner
    beyond = range(core, p)
    first = [Message(r, r - core, whole, True) for r in beyond]
    return [first, *inner, [Message(r - core, r, whole, False) for r in beyond]]


def _core(p: int) -> int:
    """The largest power of two in p."""
    return 1 << (p.bit_length() - 1)


def _powers(core: int) -> list[int]:
    """1, 2, 4, ... below core."""
    return [1 << k for k in range(core.bit_length() - 1)]


# ---- what they cost ------------------------------------------------------------------------------


def times(made: list[Step], sizes: list[int], cluster: Cluster) -> list[float]:
    """When the last rank has done each step, on the emulated network: the start, then each step. A
    rank begins a step when it has sent and received all of its own of the steps before."""
    p = len(cluster.node_of)
    network = Network(cluster.link, range(p), cluster.node_of, Lines())
    ready, ends = [0.0] * p, [0.0]
    for step in made:
        ready = network.travel([[(m.sender, m.receiver, size_of(m, sizes)) for m in step]], ready)
        ends.append(max(ready))
    return ends


def costs(operation: str, algorithm: str, nbytes: int, cluster: Cluster) -> dict[str, Any]:
    """A line of the table: the critical path, by formula, and what the network makes of it."""
    p = len(cluster.node_of)
    path = cost(operation, algorithm, p, nbytes)
    made, sizes = messages(operation, algorithm, p), piece_sizes(algorithm, p, nbytes)
    leaving = [m for m in chain(*made) if cluster.node_of[m.sender] == 0 and cluster.crosses(m)]
    return {
        "messages": path.messages,
        "nbytes": path.nbytes,
        "formula": cluster.formula(path),
        "network": times(made, sizes, cluster)[-1],
        "leave_node": sum(size_of(m, sizes) for m in leaving),
    }
