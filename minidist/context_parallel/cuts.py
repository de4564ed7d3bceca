"""Which tokens of a sequence each rank has, and what attention they need.

| cut | rank r of N has | its work in causal attention |
|---|---|---|
| contiguous | the r-th of N parts | (2r + 1) / N of the mean: nearly twice for the last |
| zigzag | parts r and 2N - 1 - r of 2N | the same for all, at every step of the ring |
| striped | tokens r, r + N, r + 2N, ... | the same but for the diagonal |

Zigzag is that of Llama 3 (arXiv 2407.21783), striped that of Brandon et al. (arXiv 2311.09431).
Lesson: long_sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None


def contiguous(length: int, ranks: int) -> list[torch.Tensor]:
    return list(torch.arange(length).tensor_split(ranks))


def zigzag(length: int, ranks: int) -> list[torch.Tensor]:
    parts = torch.arange(length).tensor_split(2 * ranks)
    return [torch.cat([parts[r], parts[-1 - r]]) for r in range(ranks)]


def striped(length: int, ranks: int) -> list[torch.Tensor]:
    return [torch.arange(r, length, ranks) for r in range(ranks)]


CUTS: dict[str, Callable[[int, int], list[torch.Tensor]]] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "striped": striped,
}


@dataclass
class Block:
    """The smallest rectangle of queries and keys that holds all pairs allowed. Of it, those on and
    below the diagonal if `causal`; those `seen` (rows, columns), if given; else all."""

    rows: slice
    columns: slice
    causal: bool = False
    seen: torch.Tensor | None = None

    @property
    def work(self) -> float:
        """Pairs of tokens that a kernel computes, if it skips what is above a diagonal."""
        rows, columns = (each.stop - each.start for each in (self.rows, self.columns))
        return rows * (rows + 1) / 2 if self.causal else float(rows * columns)


@dataclass
class Cut:
    """Who has which tokens. Every rank knows all of it, so no message is needed for a mask.

    positions: (T_r,) of each rank, ascending: where in the whole sequence its tokens stand.
    documents: (T,), a number for each token of the whole sequence: no token sees another document.
        The tokens of a document stand in a row. None is one document.
    """

    positions: list[torch.Tensor]
    documents: torch.Tensor | None = None
    _blocks: dict[tuple[int, int], Block | None] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, kind: str, length: int, ranks: int, documents: torch.Tensor | None = None) -> "Cut":
        """One of `CUTS`. Raises ValueError for another, or for documents of another length."""
        if kind not in CUTS:
            raise ValueError(f"cut must be one of {', '.join(CUTS)}, not {kind!r}")
        if documents is not None and documents.shape != (length,):
            found = tuple(documents.shape)
            raise ValueError(f"documents are ({length},), one number a token, not {found}")
        if documents is None:
            return _of_one_document(kind, length, ranks)
        return cls(CUTS[kind](length, ranks), documents.cpu())

    def take(self, x: torch.Tensor, rank: int, dim: int = 1) -> torch.Tensor:
        """A rank's tokens of a whole tensor."""
        return x.index_select(dim, self.positions[rank].to(x.device))

    def join(self, parts: list[torch.Tensor], dim: int = 1) -> torch.Tensor:
        """The whole tensor, of all ranks' parts."""
        back = torch.cat(self.positions).argsort().to(parts[0].device)
        return torch.cat(parts, dim).index_select(dim, back)

    def in_document(self, rank: int) -> torch.Tensor:
        """(T_r,): each token's position in its own document. That is what RoPE wants."""
        own = self.positions[rank]
        if self.documents is None:
            return own
        begins = torch.ones_like(self.documents, dtype=torch.bool)
        begins[1:] = self.documents[1:] != self.documents[:-1]
        starts = torch.where(begins, torch.arange(len(begins)), 0).cummax(0).values
        return own - starts[own]

    def allowed(self, to: int, of: int) -> torch.Tensor:
        """(T_to, T_of): which keys of one rank a query of another sees."""
        queries, keys = self.positions[to], self.positions[of]
        seen = queries[:, None] >= keys
        if self.documents is not None:
            seen &= self.documents[queries][:, None] == self.documents[keys]
        return seen

    def block(self, to: int, of: int) -> Block | None:
        """What a rank computes with the keys of another; None if nothing."""
        if (to, of) not in self._blocks:  # the same in every layer
            self._blocks[to, of] = _smallest(self.allowed(to, of))
        return self._blocks[to, of]


@lru_cache  # what a rank computes need not be found again at each step
def _of_one_document(kind: str, length: int, ranks: int) -> Cut:
    return Cut(CUTS[kind](length, ranks))


def _smallest(seen: torch.Tensor) -> Block | None:
    rows, columns = _span(seen.any(1)), _span(seen.any(0))
    seen = seen[rows, columns]
    if not seen.numel():
        return None
    if seen.all():
        return Block(rows, columns)
    square = seen.shape[0] == seen.shape[1]
    if square and torch.equal(seen, torch.ones_like(seen).tril()):
        return Block(rows, columns, causal=True)
    return Block(rows, columns, seen=seen)


def _span(marks: torch.Tensor) -> slice:
    """From the first True to the last."""
    where = marks.nonzero().flatten().tolist()
    return slice(where[0], where[-1] + 1) if where else slice(0, 0)
