"""Before a collective, the ranks agree that they all mean the same call (lesson: collectives).

Without this, a rank that passes another shape, another dtype or another root than the others
makes them wait for ever, or gives wrong numbers silently. So each rank condenses its call into a
header of 16 bytes. The headers go up a binomial tree to the group's first rank, each rank
comparing those of its children with its own, and the verdict comes back down: 2(p-1) tiny
messages, 2⌈lg p⌉ of them in sequence. Only when something is wrong do the calls travel as text,
and every rank raises the same ValueError, which shows all of them.

Large systems leave this out for speed, and offer it as a debugging mode.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import torch

from minidist.collectives import algorithms, reduce_op
from minidist.collectives.cost import ALGORITHMS
from minidist.collectives.peers import Peers
from minidist.collectives.reduce_op import Reduction
from minidist.measure import record

HEADER_BYTES = 16
_REFUSED = bytes(HEADER_BYTES)


class Call:
    """One rank's call of a collective: what it says, and what is wrong with it if anything is.

    The methods note one argument each, never raise, and return what the algorithms need; `agree`
    then raises ValueError on every rank, or on none.
    """

    def __init__(self, operation: str, peers: Peers, algorithm: str) -> None:
        self.operation = operation
        self.peers = peers
        self.algorithm = algorithm
        self.problem = ""  # the first one found
        self._shared: list[str] = []  # arguments that all ranks must have alike
        self._own: list[str] = []  # arguments that only some ranks have
        known = ALGORITHMS[operation]
        if algorithm not in known:
            self.refuse(f"algorithm must be one of {', '.join(known)}")

    def refuse(self, problem: str) -> None:
        self.problem = self.problem or problem

    def tensor(self, name: str, tensor: object, written: bool, shared: bool = True) -> None:
        """`tensor` must be a dense tensor, and if it is `written`, one without overlap. Its shape
        is the same on all ranks if it is `shared`; its dtype always is."""
        if not isinstance(tensor, torch.Tensor):
            return self.refuse(f"{name} must be a tensor, not {type(tensor).__name__}")
        (self._shared if shared else self._own).append(f"shape={_shape(tensor)}")
        self._dtype(tensor)
        self._check(name, tensor, written)

    def tensors(
        self,
        name: str,
        tensors: object,
        like: object,
        written: bool,
        shared: bool = False,
        shapes: str = "any",
    ) -> torch.Tensor | None:
        """`tensors` must be a list of one tensor a rank, of dtype and device as `like`, or as its
        first one if `like` is no tensor. Returns the tensor that the others were compared with.

        shapes: "any"; "equal", all as `like`; or "own", the one at our own rank as `like`."""
        p = self.peers.size
        if not _is_tensors(tensors):
            found = type(tensors).__name__ if tensors is not None else "None"
            self.refuse(f"{name} must be a list of {p} tensors, not {found}")
            return None
        if not isinstance(like, torch.Tensor):
            like = tensors[0] if tensors else torch.empty(0)
            self._dtype(like)
        (self._shared if shared else self._own).append(f"{name}={_shapes(tensors)}")
        if len(tensors) != p:
            self.refuse(f"{name} must have {p} tensors, one a rank, not {len(tensors)}")
        for i, tensor in enumerate(tensors):
            each = f"{name}[{i}]"
            self._check(each, tensor, written)
            if tensor.dtype != like.dtype:
                self.refuse(f"{each} is {_name(tensor.dtype)}, not {_name(like.dtype)}")
            if tensor.device != like.device:
                self.refuse(f"{each} is on {tensor.device}, not on {like.device}")
            if shapes == "equal" or (shapes == "own" and i == self.peers.rank):
                if tensor.shape != like.shape:
                    self.refuse(f"{each} has shape {_shape(tensor)}, not {_shape(like)}")
        return like

    def no_tensors(self, name: str, tensors: object, role: str) -> None:
        """A list must not be given here, since this rank is not the `role`. An empty one may."""
        if tensors is not None and not (_is_tensors(tensors) and not tensors):
            self.refuse(f"{name} is for the {role} rank only")

    def root(self, name: str, rank: int | None, group_rank: int | None, default: bool) -> int:
        """The rank within the group of the root, which is given in the world or in the group."""
        ranks = self.peers.global_ranks
        if rank is None and group_rank is None and default:
            rank = 0
        if (rank is None) == (group_rank is None):
            self.refuse(f"give either {name} or group_{name}")
        elif rank is not None:
            self._shared.append(f"{name}={rank}")
            if rank in ranks:
                return ranks.index(rank)
            self.refuse(f"{name}={rank} is not in this group of ranks {_list(ranks)}")
        elif group_rank is not None and group_rank in range(len(ranks)):
            self._shared.append(f"{name}={ranks[group_rank]}")
            return group_rank
        else:
            self._shared.append(f"group_{name}={group_rank}")
            self.refuse(f"group_{name}={group_rank} is not in 0..{len(ranks) - 1}")
        return 0

    def reduction(self, op: Any, tensor: object) -> None:
        """The operation of a reduction; it must be defined for the dtype of `tensor`."""
        self._shared.append(f"op={reduce_op.name(op)}")
        try:
            if isinstance(tensor, torch.Tensor):
                Reduction(op, tensor.dtype)
        except ValueError as error:
            self.refuse(str(error))

    def _dtype(self, tensor: torch.Tensor) -> None:
        self._shared.append(f"dtype={_name(tensor.dtype)}")

    def _check(self, name: str, tensor: torch.Tensor, written: bool) -> None:
        if tensor.layout != torch.strided or tensor.is_quantized:
            self.refuse(f"{name} must be a dense tensor")
        elif written and _overlaps(tensor):
            self.refuse(f"{name} is expanded: several of its elements share one place in memory")

    def agree(self) -> Callable[..., Any]:
        """Raise ValueError on every rank unless all ranks made the same valid call. Returns the
        loop: for `all_reduce` by "ring", `algorithms.all_reduce_ring`."""
        with record.scope("agreement", control=True):
            calls = [] if self._everyone_agrees() else self._exchange_texts()
        if calls:
            head = "refused: every rank of the group must make the same, valid call"
            ranks = self.peers.global_ranks
            lines = [f"  rank {rank}: {call}" for rank, call in zip(ranks, calls, strict=True)]
            raise ValueError("\n".join([head, *lines]))
        loop: Callable[..., Any] = getattr(algorithms, f"{self.operation}_{self.algorithm}")
        return loop

    def agree_on_pairs(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        """Raise ValueError on every rank unless what each rank has for another has the shape that
        the other expects: these may differ from pair to pair, so each pair compares its own."""
        peers = self.peers
        with record.scope("agreement", control=True):
            theirs = [self._shape_header(t) for t in inputs]  # what each of them will get from us
            arrived = [torch.empty_like(header) for header in theirs]
            algorithms.all_to_all_pairwise(peers, arrived, theirs)
        for i, output in enumerate(outputs):
            if not arrived[i].equal(self._shape_header(output)):
                rank = peers.global_ranks[i]
                self.refuse(f"output_tensor_list[{i}] is not of the shape that rank {rank} sends")
        self.agree()

    def _shape_header(self, tensor: torch.Tensor) -> torch.Tensor:
        header = hashlib.blake2b(_shape(tensor).encode(), digest_size=HEADER_BYTES).digest()
        return torch.tensor(list(header), dtype=torch.uint8, device=self.peers.device)

    def _everyone_agrees(self) -> bool:
        peers, header = self.peers, self._header()
        device = peers.device
        incoming = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=device)
        for child in reversed(peers.children(0)):
            if bytes(peers.recv(incoming, child).tolist()) != header:
                header = _REFUSED
        verdict = torch.tensor(list(header), dtype=torch.uint8, device=device)
        if peers.rank != 0:
            peers.send(verdict, peers.parent(0))
            peers.recv(verdict, peers.parent(0))
        for child in peers.children(0):
            peers.send(verdict, child)
        return bytes(verdict.tolist()) != _REFUSED

    def _header(self) -> bytes:
        if self.problem:
            return _REFUSED
        shared = [self.operation, *self._shared, f"algorithm={self.algorithm}"]
        return hashlib.blake2b("|".join(shared).encode(), digest_size=HEADER_BYTES).digest()

    def _exchange_texts(self) -> list[str]:
        peers = self.peers
        if peers.rank != 0:
            _send_text(peers, str(self), 0)
            return _recv_text(peers, 0).split("\n")
        calls = [str(self)] + [_recv_text(peers, other) for other in range(1, peers.size)]
        for other in range(1, peers.size):
            _send_text(peers, "\n".join(calls), other)
        return calls

    def __str__(self) -> str:
        arguments = ", ".join([*self._shared, *self._own, f"algorithm={self.algorithm}"])
        text = f"{self.operation}({arguments})" + (self.problem and f"  <- {self.problem}")
        return text.replace("\n", " ")


def _send_text(peers: Peers, text: str, to: int) -> None:
    data = text.encode()
    device = peers.device
    peers.send(torch.tensor([len(data)], device=device), to)
    peers.send(torch.tensor(list(data), dtype=torch.uint8, device=device), to)


def _recv_text(peers: Peers, source: int) -> str:
    device = peers.device
    length = peers.recv(torch.zeros(1, dtype=torch.int64, device=device), source)
    data = torch.empty(int(length), dtype=torch.uint8, device=device)
    return bytes(peers.recv(data, source).tolist()).decode()


def _is_tensors(value: object) -> TypeGuard[Sequence[torch.Tensor]]:
    return isinstance(value, (list, tuple)) and all(isinstance(v, torch.Tensor) for v in value)


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
