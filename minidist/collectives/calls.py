"""What a rank passes to each of the nine collectives: a table; and what can be wrong with it.

Lesson: collectives
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minidist.collectives import algorithms, reduce_op
from minidist.collectives.agreement import agree, unlike
from minidist.collectives.cost import ALGORITHMS
from minidist.collectives.peers import Peers
from minidist.collectives.vectors import flat, put_back
from minidist.measure import record


class Row(NamedTuple):
    """own: a rank's own tensor. lists: of one tensor a rank. writes: which of these is filled.
    alike: which has the same shapes on all ranks."""

    own: str = ""
    lists: tuple[str, ...] = ()
    root: str = ""
    writes: str = ""
    alike: str = ""
    reduces: bool = False


# With a root, the root alone has the list, and all tensors are alike. Without one every rank has
# the list, which says how large everybody's own tensor is. An all_to_all has a size for each pair.
ROWS = {
    "broadcast": Row("tensor", (), "src", "tensor", "tensor"),
    "reduce": Row("tensor", (), "dst", "tensor", "tensor", reduces=True),
    "all_reduce": Row("tensor", (), "", "tensor", "tensor", reduces=True),
    "scatter": Row("tensor", ("scatter_list",), "src", "tensor", "tensor"),
    "gather": Row("tensor", ("gather_list",), "dst", "gather_list", "tensor"),
    "all_gather": Row("tensor", ("tensor_list",), "", "tensor_list", "tensor_list"),
    "reduce_scatter": Row("output", ("input_list",), "", "output", "input_list", reduces=True),
    "all_to_all": Row("", ("output_tensor_list", "input_tensor_list"), "", "output_tensor_list"),
    "barrier": Row(),
}
ROLES = {"src": "source", "dst": "destination"}
Root = tuple[int | None, int | None]  # in the world, in the group


def run(
    operation: str,
    group: dist.ProcessGroup | None,
    *given: Any,
    algorithm: str | None = None,
    root: Root = (None, None),
    op: Any = None,
) -> None:
    """One rank's call. given: the tensors, in the order of the row: its own, its lists.

    Raises ValueError on every rank unless all ranks make the same valid call.
    """
    call = Call(operation, Peers(group), given, algorithm, root, op)
    call.agree()
    vectors = [flat(each) for each in given]
    with record.scope(operation, call.nbytes()):
        getattr(algorithms, f"{operation}_{call.algorithm}")(call.peers, *vectors, *call.more)
        for name, each, vector in zip(call.given, given, vectors, strict=True):
            if name == call.row.writes:
                put_back(vector, each)


class Call:
    """What one rank passes: what all ranks must pass alike (`shared`), what the algorithm takes
    beside vectors (`more`), and the first `problem` with it if there is any."""

    def __init__(
        self,
        operation: str,
        peers: Peers,
        given: Sequence[Any],
        algorithm: str | None,
        root: Root,
        op: Any,
    ) -> None:
        self.operation, self.peers = operation, peers
        self.row, known = ROWS[operation], ALGORITHMS[operation]
        self.algorithm = known[0] if algorithm is None else algorithm
        names = [name for name in (self.row.own, *self.row.lists) if name]
        self.given = dict(zip(names, given, strict=True))
        op_name = reduce_op.name(op) if self.row.reduces else None
        self.choices: dict[str, object] = {
            self.row.root: root[0],
            f"group_{self.row.root}": root[1],
            "op": op_name,
            "algorithm": algorithm,
        }
        self.more: list[Any] = []
        self.shared = self.problem = ""
        try:
            if self.algorithm not in known:
                raise ValueError(f"algorithm must be one of {', '.join(known)}")
            if self.row.root:
                self.more.append(self._root(*root))
            self._require_kinds()
            self._require_alike()
            dtypes = {tensor.dtype for name in names for tensor in self._tensors(name)}  # one
            shapes = [tensor.shape for tensor in self._tensors(self.row.alike)]
            self.shared = f"{operation} {self.algorithm} {op_name} {self.more} {dtypes} {shapes}"
            if op_name:
                self.more.append(reduce_op.reduction(op_name, dtypes.pop()))
        except ValueError as problem:
            self.problem = str(problem)

    def _root(self, rank: int | None, group_rank: int | None) -> int:
        """The rank within the group of the root. Where the root has a list it is rank 0 of the
        world, unless it is given."""
        name, ranks = self.row.root, self.peers.global_ranks
        if rank is None and group_rank is None and self.row.lists:
            rank = 0
        if (rank is None) == (group_rank is None):
            raise ValueError(f"give either {name} or group_{name}")
        if rank is not None and rank not in ranks:
            raise ValueError(f"{name}={rank} is not in this group of ranks {ranks}")
        place: Any = group_rank if rank is None else ranks.index(rank)
        if place not in range(len(ranks)):
            raise ValueError(f"group_{name}={place} is not in 0..{len(ranks) - 1}")
        return place

    def _require_kinds(self) -> None:
        """Our own is a tensor, a list has a tensor for each rank. With a root only that has it."""
        p, has_lists = self.peers.size, not self.row.root or self.more == [self.peers.rank]
        for name, value in self.given.items():
            if name == self.row.own:
                if not isinstance(value, torch.Tensor):
                    raise ValueError(f"{name} must be a tensor")
            elif has_lists:
                several = value if isinstance(value, (list, tuple)) else ()
                if [isinstance(each, torch.Tensor) for each in several] != [True] * p:
                    raise ValueError(f"{name} must be a list of {p} tensors, one a rank")
            elif isinstance(value, torch.Tensor) or value:
                raise ValueError(f"{name} is for the {ROLES[self.row.root]} rank only")

    def _require_alike(self) -> None:
        """All tensors are dense, and of one dtype and device. Where our own has the shape of all
        others', so have those of a list; where the list says which, it says ours, too."""
        row = self.row
        each = [(name, i, t) for name in self.given for i, t in enumerate(self._tensors(name))]
        for name, i, tensor in each:
            like, called = each[0][2], name if name == row.own else f"{name}[{i}]"
            if tensor.layout != torch.strided or tensor.is_quantized:
                raise ValueError(f"{called} must be a dense tensor")
            self.peers.require_sendable(tensor)
            if name == row.writes and is_expanded(tensor):
                raise ValueError(f"{called} is expanded: its elements share places in memory")
            fits = row.own and (row.alike == row.own or i == self.peers.rank)
            other_kind = tensor.dtype != like.dtype or tensor.device != like.device
            if other_kind or (fits and tensor.shape != like.shape):
                raise ValueError(f"{called} is {_shown(tensor)}, not {_shown(like)}")

    def _tensors(self, name: str) -> list[torch.Tensor]:
        value = self.given.get(name)
        return [value] if isinstance(value, torch.Tensor) else list(value or ())

    def agree(self) -> None:
        """Raise ValueError on every rank unless all ranks made the same valid call."""
        agree(self.peers, self.shared, self, self.problem)
        if self.row.lists and not self.row.own:  # a size for each pair, which compares its own
            outputs, inputs = ([str(t.shape) for t in each] for each in self.given.values())
            for i in unlike(self.peers, inputs, outputs):
                rank = self.peers.global_ranks[i]
                self.problem = f"{self.row.writes}[{i}] is not of the shape that rank {rank} sends"
            agree(self.peers, self.shared, self, self.problem)

    def __str__(self) -> str:
        arguments = {name: _shown(value) for name, value in self.given.items()} | self.choices
        shown = [f"{name}={value}" for name, value in arguments.items() if value is not None]
        return f"{self.operation}({', '.join(shown)})"

    def nbytes(self) -> int:
        """Of the whole vector, as `cost` has it."""
        if self.row.root and self.row.lists:
            return self.given[self.row.own].nbytes * self.peers.size
        return sum(tensor.nbytes for name in [*self.given][-1:] for tensor in self._tensors(name))


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements share a place by `expand`. (What `as_strided` can do beyond that is not
    looked for: torch writes to it, too.)"""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(size > 1 and step == 0 for size, step in steps)


def _shown(value: object) -> str | None:
    if isinstance(value, torch.Tensor):
        where = f" on {value.device}" if value.device.type != "cpu" else ""
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{where}"
    if isinstance(value, (list, tuple)):
        each = [str(_shown(one)) for one in value]
        same = len(each) > 1 and len(set(each)) == 1
        return f"{len(each)} × {each[0]}" if same else f"[{', '.join(each)}]"
    return None if value is None else type(value).__name__
