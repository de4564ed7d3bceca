"""What a look can say without one process: the ranks side by side (lesson: wrong_in_silence)."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from minidist.common.tensors_in import tensors_of
from minidist.watching.snapshot import MODEL, Key, Snapshot, bare_name


@dataclass
class Seen:
    """What a rank has seen in a step.

    options: of the optimizer's groups, when it took its step; of each step, if it took several.
    draw: a fingerprint of the random numbers' state before forward. drew: whether it moved.
    """

    rows: list[str] = field(default_factory=list)
    options: list[list[dict[str, Any]]] = field(default_factory=list)
    draw: int = 0
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


def rows_of(batch: Any) -> list[str]:
    """A few bytes for each example of a batch."""
    tensors = [x.detach().cpu().contiguous() for x in tensors_of(batch) if x.ndim and x.numel()]
    arrays = [x.view(len(x), -1).view(torch.uint8).numpy() for x in tensors]
    return [
        hashlib.blake2b(b"".join(row.tobytes() for row in rows), digest_size=8).hexdigest()
        for rows in zip(*arrays, strict=False)
    ]


def ungrouped(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Each parameter that is trained must be in one group of the optimizer."""
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    trained = [(bare_name(n), p) for n, p in model.named_parameters() if p.requires_grad]
    without = [name for name, p in trained if id(p) not in held]
    more = f" and {len(without) - 3} more" if len(without) > 3 else ""
    return [f"no group of the optimizer has {', '.join(without[:3])}{more}"] if without else []


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
            name = key[0].removeprefix(MODEL)
            holder, theirs = first.setdefault(key, (rank, values))
            if theirs != values and (buffers or name not in seen.buffers):
                wrong.setdefault(name, (rank, holder))
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
    same = len({seen.draw for seen in own}) < len(own) and any(seen.drew for seen in own)
    return ["ranks with other examples draw the same random numbers, as for dropout"] * same


def doubles(own: Sequence[Seen]) -> list[str]:
    """Ranks must have different examples. (A few that are equal may be the data's own.)"""
    rows = [row for seen in own for row in seen.rows]
    twice = len(rows) - len(set(rows))
    words = f"{twice} of {len(rows)} examples of this step are there twice (no sampler? sources?)"
    return [words] * (10 * twice > len(rows))
