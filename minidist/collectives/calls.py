"""The nine collectives as a table, and how a call of one begins (lesson: collectives).

A rank that passes another shape or root than the others would make them wait for ever, or give
wrong numbers silently. So each looks once at what it was given, and puts into words what all ranks
must have alike. Then they compare their words: the agreement. Large systems leave that out for
speed, and offer it as a debugging mode.
"""

import hashlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minidist.collectives import algorithms
from minidist.collectives.cost import ALGORITHMS
from minidist.collectives.peers import Peers
from minidist.collectives.reduce_op import Reduction
from minidist.instruments.measure import record


class Row(NamedTuple):
    """own: a rank's own tensor. lists: of one tensor a rank. fills: which of these is written to.
    alike: which has the same shapes on all ranks."""

    own: str = ""
    lists: tuple[str, ...] = ()
    fills: str = ""
    alike: str = ""
    root: str = ""


# With a root, the root alone has the list, and all tensors are alike. Without one every rank has
# the list, which says how large everybody's own tensor is. An all_to_all has a size for each pair.
ROWS = {
    "broadcast": Row("tensor", (), "tensor", "tensor", "src"),
    "reduce": Row("tensor", (), "tensor", "tensor", "dst"),
    "all_reduce": Row("tensor", (), "tensor", "tensor"),
    "scatter": Row("tensor", ("scatter_list",), "tensor", "tensor", "src"),
    "gather": Row("tensor", ("gather_list",), "gather_list", "tensor", "dst"),
    "all_gather": Row("tensor", ("tensor_list",), "tensor_list", "tensor_list"),
    "reduce_scatter": Row("output", ("input_list",), "output", "input_list"),
    "all_to_all": Row("", ("output_tensor_list", "input_tensor_list"), "output_tensor_list"),
    "barrier": Row(),
}
LARGEST = Reduction("MAX", torch.int64)


def run(
    operation: str,
    group: dist.ProcessGroup | None,
    *tensors: Any,
    algorithm: str | None = None,
    root: int | None = None,
    op: Any = None,
) -> None:
    """One rank's call. tensors: as in the row, its own, then its lists. Raises ValueError on every
    rank unless all ranks make the same valid call."""
    peers, row = Peers(group), ROWS[operation]
    algorithm = algorithm or ALGORITHMS[operation][0]
    given = dict(zip(filter(None, (row.own, *row.lists)), tensors, strict=True))
    words, more, problem = operation, list[Any](), ""
    try:
        words, more = look(operation, peers, given, algorithm, root, op)
    except ValueError as error:
        problem = str(error)
    agree(peers, words, problem)
    if operation == "all_to_all":
        agree(peers, words, compare_pairs(peers, *tensors))
    vectors = {name: flat(each) for name, each in given.items()}
    with record.scope(operation):
        getattr(algorithms, f"{operation}_{algorithm}")(peers, *vectors.values(), *more)
        if row.fills:
            put_back(vectors[row.fills], given[row.fills])


def look(
    operation: str, peers: Peers, given: dict[str, Any], algorithm: str, root: Any, op: Any
) -> tuple[str, list[Any]]:
    """What all ranks must have alike, in words; and what the algorithm takes beside vectors.

    Raises ValueError for what is wrong on this rank.
    """
    row, known = ROWS[operation], ALGORITHMS[operation]
    if algorithm not in known:
        raise ValueError(f"algorithm must be one of {', '.join(known)}, not {algorithm!r}")
    place = place_of(root, row, peers) if row.root else peers.rank
    each = []  # names, tensors, and whether they have the shape of the first one
    for name, value in given.items():
        if name == row.own:
            each.append((name, value, True))
        elif place == peers.rank:
            if not isinstance(value, (list, tuple)) or len(value) != peers.size:
                raise ValueError(f"{name} must be a list of {peers.size} tensors, one a rank")
            for i, x in enumerate(value):
                each.append((f"{name}[{i}]", x, bool(row.own and (row.root or i == place))))
    for name, x, fits in each:
        like = each[0][1]
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} must be a tensor, not {type(x).__name__}")
        if (x.dtype, x.device) != (like.dtype, like.device) or (fits and x.shape != like.shape):
            raise ValueError(f"{name} is {shown(x)}, not {shown(like)}")

    words, more = [f"{row.alike}={shown(given[row.alike])}"] if row.alike else [], list[Any]()
    if row.root:
        words.append(f"{row.root}={peers.global_ranks[place]}")
        more.append(place)
    if op is not None:
        words.append(f"op={getattr(op, 'name', op)}")
        more.append(Reduction(getattr(op, "name", op), like.dtype))
    words.append(f"algorithm={algorithm}")
    return f"{operation}({', '.join(words)})", more


def place_of(root: int | None, row: Row, peers: Peers) -> int:
    """The root's rank within the group. One with a list is rank 0 of the world, unless given."""
    root = 0 if row.lists and root is None else root
    if root not in peers.global_ranks:
        raise ValueError(f"the root, {root}, is not in this group of ranks {peers.global_ranks}")
    return peers.global_ranks.index(root)


def agree(peers: Peers, words: str, problem: str) -> None:
    """Raise ValueError on every rank, unless all ranks have the same words and none has a problem.

    An all_reduce by a tree finds the largest digest of the words, and the smallest: if they are
    one, all are. That takes 2(p-1) messages of 16 bytes, 2⌈lg p⌉ of them in sequence.
    """
    number = 1 << 60 if problem else digest(words)  # a problem is larger than any digest
    ends = torch.tensor([number, -number], device=peers.device)
    with record.scope("agreement", control=True):
        algorithms.all_reduce_tree(peers, ends, LARGEST)
        if not problem and ends.tolist() == [number, -number]:
            return
        lines = [""] * peers.size
        dist.all_gather_object(lines, f"{words}  <- {problem}" if problem else words, peers.group)
    head = "refused: every rank of the group must make the same, valid call"
    told = [f"  rank {r}: {line}" for r, line in zip(peers.global_ranks, lines, strict=True)]
    raise ValueError("\n".join([head, *told]))


def compare_pairs(peers: Peers, outputs: Any, inputs: Any) -> str:
    """The problem, if a rank sends us something else than we await: each rank tells each."""
    awaited = torch.tensor([digest(shown(x)) for x in outputs], device=peers.device)
    sent = torch.tensor([digest(shown(x)) for x in inputs], device=peers.device)
    arrived = torch.empty_like(sent)
    with record.scope("agreement", control=True):
        algorithms.all_to_all_pairwise(peers, arrived.split(1), sent.split(1))
    for i in (arrived != awaited).nonzero().flatten().tolist():
        rank = peers.global_ranks[i]
        return f"output_tensor_list[{i}] is {shown(outputs[i])}: rank {rank} sends another one"
    return ""


def digest(words: str) -> int:
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=7).digest())


def shown(given: Any) -> str:
    """The dtype and shape of a tensor, or of several."""
    if isinstance(given, torch.Tensor):
        return f"{str(given.dtype).removeprefix('torch.')} {tuple(given.shape)}"
    return f"[{', '.join(map(shown, given))}]"


def flat(given: Any) -> Any:
    """The elements of a tensor in a row, contiguous: (*,) -> (n,). A view where possible, else a
    copy. Of a list, a list of these; of None, an empty one."""
    if isinstance(given, torch.Tensor):
        return given.detach().contiguous().view(-1)
    return [flat(each) for each in given or ()]


def put_back(vector: Any, given: Any) -> None:
    """Write `vector`, which is `flat(given)`, back to what was given, if it was a copy."""
    if not isinstance(given, torch.Tensor):
        for pair in zip(vector, given or (), strict=True):
            put_back(*pair)
    elif vector.data_ptr() != given.data_ptr():
        given.detach().copy_(vector.view(given.shape))
