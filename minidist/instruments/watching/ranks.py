"""What a look can say without one process: the ranks side by side (lesson: wrong_in_silence)."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from minidist.common.tensors_in import tensors_of
from minidist.instruments.watching.mixture import some
from minidist.instruments.watching.snapshot import MODEL, Key, Snapshot, bare_name


@dataclass
class Seen:
    """What a rank has seen in a step.

    options: of the optimizer's groups, when it took its step; of each step, if it took several.
    stream: where the random numbers were before forward, in a few bytes. drew: whether they moved.
    """

    rows: list[str] = field(default_factory=list)
    options: list[list[dict[str, Any]]] = field(default_factory=list)
    stream: int = 0
    drew: bool = False
    dtype: torch.dtype = torch.float64  # the lowest that a module gives
    wrong: list[str] = field(default_factory=list)
    cannot: list[str] = field(default_factory=list)
    groups: list[list[str]] = field(default_factory=list)
    buffers: set[str] = field(default_factory=set)
    prints: dict[Key, int] = field(default_factory=dict)

    def take(self, snapshot: Snapshot) -> None:
        """What is in the model and its optimizer after the step."""
        self.groups, self.buffers = snapshot.groups, snapshot.buffers
        self.prints = snapshot.prints()


def digest(data: bytes) -> str:
    """Eight bytes of it."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def rows_of(batch: Any) -> list[str]:
    """A few bytes for each example of a batch."""
    dense = torch.contiguous_format
    tensors = [x.detach().cpu().clone(memory_format=dense) for x in tensors_of(batch) if x.ndim]
    arrays = [x.view(len(x), -1).view(torch.uint8).numpy() for x in tensors if x.numel()]
    return [digest(b"".join(row.tobytes() for row in of)) for of in zip(*arrays, strict=False)]


def ungrouped(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Each parameter that is trained must be in one group of the optimizer."""
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    trained = [(bare_name(n), p) for n, p in model.named_parameters() if p.requires_grad]
    without = [name for name, p in trained if id(p) not in held]
    return [f"no group of the optimizer has {some(without, 0)}"] if without else []


def own_problems(everyone: Sequence[Seen]) -> list[str]:
    """What ranks found out alone."""
    by_words: dict[str, list[int]] = {}
    for rank, seen in enumerate(everyone):
        for words in seen.wrong:
            by_words.setdefault(words, []).append(rank)
    steps = [len(seen.options) for seen in everyone]
    if len(set(steps)) > 1:
        return [f"the optimizers of the ranks took {steps} steps"]
    return [
        words if len(of) == len(everyone) else f"rank {of[0]}: {words}"
        for words, of in by_words.items()
    ]


def replicas(everyone: Sequence[Seen], buffers: bool = False) -> list[str]:
    """Ranks that have the same piece of a tensor must have the same values in it; and their
    optimizers the same options. buffers: they, too."""
    first: dict[Key, tuple[int, int]] = {}
    wrong: dict[str, tuple[int, int]] = {}
    problems = []
    for rank, seen in enumerate(everyone):
        for key, values in seen.prints.items():
            kind, name = key[0].split(".", 1)
            holder, theirs = first.setdefault(key, (rank, values))
            if theirs != values and (buffers or name not in seen.buffers):
                of = name if kind + "." == MODEL else name.split(".", 1)[1]  # a state of it
                wrong.setdefault(of, (rank, holder))
        for steps in zip(everyone[0].options[:1], seen.options[:1], strict=True):
            for a, b in zip(*steps, strict=False):
                problems += [
                    f"the optimizer of rank {rank} has {key} {b.get(key)}, that of rank 0 {value}"
                    for key, value in a.items()
                    if repr(value) != repr(b.get(key))
                ]
    if wrong:
        name, (rank, holder) = next(iter(wrong.items()))
        more = f", and of {len(wrong) - 1} more" if len(wrong) > 1 else ""
        problems.append(f"rank {rank} has other values of {name} than rank {holder}{more}")
    return problems


def draws(own: Sequence[Seen]) -> list[str]:
    """Ranks with other examples must not draw the same random numbers."""
    same = len({seen.stream for seen in own}) < len(own) and any(seen.drew for seen in own)
    return ["ranks with other examples draw the same random numbers, as for dropout"] * same


def doubles(own: Sequence[Seen]) -> list[str]:
    """Ranks must have different examples. (A few that are equal may be the data's own.)"""
    count = sum(len(seen.rows) for seen in own)
    twice = sum(len(set(seen.rows)) for seen in own) - len({r for seen in own for r in seen.rows})
    words = f"{twice} of {count} examples of this step are on two ranks (no sampler? sources?)"
    return [words] * (10 * twice > count)
