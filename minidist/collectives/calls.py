"""What a rank passes to each of the nine collectives: a table; and what can be wrong with it.

Lesson: collectives
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist

from minidist.collectives import algorithms, reduce_op
from minidist.collectives.agreement import HEADER_BYTES, REFUSED, agree, exchange_headers
from minidist.collectives.cost import ALGORITHMS
from minidist.collectives.peers import Peers
from minidist.collectives.reduce_op import Reduction
from minidist.collectives.vectors import flat, nbytes, put_back
from minidist.measure import record


class Row(NamedTuple):
    """own: a rank's own tensor. lists: of one tensor a rank. writes: which of these is filled."""

    own: str = ""
    lists: tuple[str, ...] = ()
    root: str = ""
    writes: str = ""
    reduces: bool = False


# With a root, the root alone has the list, and all tensors are alike. Without one every rank has
# the list, which says how large everybody's own tensor is. An all_to_all has a size for each pair.
ROWS = {
    "broadcast": Row("tensor", root="src", writes="tensor"),
    "reduce": Row("tensor", root="dst", writes="tensor", reduces=True),
    "all_reduce": Row("tensor", writes="tensor", reduces=True),
    "scatter": Row("tensor", ("scatter_list",), root="src", writes="tensor"),
    "gather": Row("tensor", ("gather_list",), root="dst", writes="gather_list"),
    "all_gather": Row("tensor", ("tensor_list",), writes="tensor_list"),
    "reduce_scatter": Row("output", ("input_list",), writes="output", reduces=True),
    "all_to_all": Row("", ("output_tensor_list", "input_tensor_list"), "", "output_tensor_list"),
    "barrier": Row(),
}
ROLES = {"src": "source", "dst": "destination"}
Root = tuple[int | None, int | None]  # in the world, in the group


def run(
    operation: str,
    algorithm: str,
    group: dist.ProcessGroup | None,
    *given: Any,
    root: Root = (None, None),
    op: Any = None,
) -> None:
    """One rank's call. given: the tensors, in the order of the row: its own, its lists.

    Raises ValueError on every rank unless all ranks make the same valid call.
    """
    call = Call(operation, algorithm, Peers(group), given, root, op)
    call.agree()
    vectors = [flat(each) for each in given]
    more: list[Any] = [call.root] if call.row.root else []
    more += [Reduction(op, call.like.dtype)] if call.row.reduces else []
    with record.scope(operation, call.nbytes()):
        getattr(algorithms, f"{operation}_{algorithm}")(call.peers, *vectors, *more)
        for name, each, vector in zip(call.names, given, vectors, strict=True):
            if name == call.row.writes:
                put_back(vector, each)


class Call:
    """What one rank passes, and the first `problem` with it if there is any."""

    def __init__(
        self,
        operation: str,
        algorithm: str,
        peers: Peers,
        given: Sequence[Any],
        root: Root,
        op: Any,
    ) -> None:
        self.operation, self.algorithm, self.peers = operation, algorithm, peers
        self.row = row = ROWS[operation]
        self.names = [name for name in (row.own, *row.lists) if name]
        self.given = dict(zip(self.names, given, strict=True))
        self.problem = ""
        self._shared: list[str] = []  # arguments that all ranks must have alike
        self._own: list[str] = []  # arguments that only some ranks have
        self.like: Any = self.given.get(row.own)  # what other tensors are compared with
        if algorithm not in ALGORITHMS[operation]:
            self._refuse(f"algorithm must be one of {', '.join(ALGORITHMS[operation])}")
        if row.own:
            self._take_own(row.own, self.like)
        if row.root:
            self.root = self._root(row.root, *root)
        for name in row.lists:
            if not row.root or peers.rank == self.root:
                self._take_list(name, self.given[name])
            elif self.given[name] is not None and not _is_empty(self.given[name]):
                self._refuse(f"{name} is for the {ROLES[row.root]} rank only")
        if row.reduces:
            self._reduction(op)

    def _refuse(self, problem: str) -> None:
        self.problem = self.problem or problem

    def _take_own(self, name: str, tensor: object) -> None:
        """A dense tensor, of one dtype on all ranks; of one shape, unless a list says which."""
        if not isinstance(tensor, torch.Tensor):
            return self._refuse(f"{name} must be a tensor, not {type(tensor).__name__}")
        alike = self.row.root or not self.row.lists
        (self._shared if alike else self._own).append(f"shape={_shape(tensor)}")
        self._shared.append(f"dtype={_name(tensor.dtype)}")
        self._require_dense(name, name, tensor)

    def _take_list(self, name: str, tensors: object) -> None:
        """One tensor a rank, of one dtype and device; of one shape, if there is a root; else the
        one of this rank is like its own tensor."""
        p, everyones = self.peers.size, bool(self.row.own) and not self.row.root
        if not _is_tensors(tensors):
            found = type(tensors).__name__ if tensors is not None else "None"
            return self._refuse(f"{name} must be a list of {p} tensors, not {found}")
        if not isinstance(self.like, torch.Tensor):
            self.like = tensors[0] if tensors else torch.empty(0)
            self._shared.append(f"dtype={_name(self.like.dtype)}")
        (self._shared if everyones else self._own).append(f"{name}={_shapes(tensors)}")
        if len(tensors) != p:
            self._refuse(f"{name} must have {p} tensors, one a rank, not {len(tensors)}")
        for i, tensor in enumerate(tensors):
            each, like = f"{name}[{i}]", self.like
            self._require_dense(name, each, tensor)
            if tensor.dtype != like.dtype:
                self._refuse(f"{each} is {_name(tensor.dtype)}, not {_name(like.dtype)}")
            if tensor.device != like.device:
                self._refuse(f"{each} is on {tensor.device}, not on {like.device}")
            fits = self.row.root or (everyones and i == self.peers.rank)
            if fits and tensor.shape != like.shape:
                self._refuse(f"{each} has shape {_shape(tensor)}, not {_shape(like)}")

    def _require_dense(self, name: str, each: str, tensor: torch.Tensor) -> None:
        if tensor.layout != torch.strided or tensor.is_quantized:
            self._refuse(f"{each} must be a dense tensor")
        elif name == self.row.writes and _overlaps(tensor):
            self._refuse(f"{each} is expanded: several of its elements share one place in memory")

    def _root(self, name: str, rank: int | None, group_rank: int | None) -> int:
        """The rank within the group of the root. Where the root has a list it is rank 0 of the
        world, unless it is given."""
        ranks = self.peers.global_ranks
        if rank is None and group_rank is None and self.row.lists:
            rank = 0
        if (rank is None) == (group_rank is None):
            self._refuse(f"give either {name} or group_{name}")
            return 0
        if group_rank is not None and group_rank in range(len(ranks)):
            rank = ranks[group_rank]
        if rank in ranks:
            self._shared.append(f"{name}={rank}")
            return ranks.index(rank)
        wrong, choices = f"{name}={rank}", f"this group of ranks {_list(ranks)}"
        if rank is None:
            wrong, choices = f"group_{name}={group_rank}", f"0..{len(ranks) - 1}"
        self._shared.append(wrong)
        self._refuse(f"{wrong} is not in {choices}")
        return 0

    def _reduction(self, op: Any) -> None:
        self._shared.append(f"op={reduce_op.name(op)}")
        try:
            if isinstance(self.like, torch.Tensor):
                Reduction(op, self.like.dtype)
        except ValueError as error:
            self._refuse(str(error))

    def nbytes(self) -> int:
        """Of the whole vector, as `cost` has it."""
        if self.row.root and self.row.lists:
            return nbytes(self.like) * self.peers.size
        return nbytes(self.given[self.names[-1]]) if self.names else 0

    def agree(self) -> None:
        """Raise ValueError on every rank unless all ranks made the same valid call."""
        agree(self.peers, self._header(), str(self))
        if self.row.lists and not self.row.own:  # a size for each pair, which compares its own
            outputs, inputs = self.given.values()
            theirs = exchange_headers(self.peers, [_digest(_shape(t)) for t in inputs])
            for i, output in enumerate(outputs):
                if theirs[i] != _digest(_shape(output)):
                    rank = self.peers.global_ranks[i]
                    self._refuse(f"{self.names[0]}[{i}] is not of the shape that rank {rank} sends")
            agree(self.peers, self._header(), str(self))

    def _header(self) -> bytes:
        shared = [self.operation, *self._shared, f"algorithm={self.algorithm}"]
        return REFUSED if self.problem else _digest("|".join(shared))

    def __str__(self) -> str:
        arguments = ", ".join([*self._shared, *self._own, f"algorithm={self.algorithm}"])
        text = f"{self.operation}({arguments})" + (self.problem and f"  <- {self.problem}")
        return text.replace("\n", " ")


def _digest(words: str) -> bytes:
    return hashlib.blake2b(words.encode(), digest_size=HEADER_BYTES).digest()


def _is_tensors(value: object) -> TypeGuard[Sequence[torch.Tensor]]:
    return isinstance(value, (list, tuple)) and all(isinstance(v, torch.Tensor) for v in value)


def _is_empty(value: object) -> bool:
    return _is_tensors(value) and not value


def _overlaps(tensor: torch.Tensor) -> bool:
    # As torch itself finds it; what `as_strided` can do beyond that is not looked for.
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(n > 1 and stride == 0 for n, stride in pairs)


def _shape(tensor: torch.Tensor) -> str:
    return str(tuple(tensor.shape))


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    shapes = [_shape(t) for t in tensors]
    same = len(shapes) > 1 and len(set(shapes)) == 1
    return f"{len(shapes)} × {shapes[0]}" if same else f"[{_list(shapes)}]"


def _list(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
