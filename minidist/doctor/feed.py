"""What a script trains on: noted on a rank, and given to the one process.

If it iterates a DataLoader, its batches. Otherwise what goes into the model, and the targets that
go into torch's losses. One process has the ranks' batches joined, examples first.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from minidist.doctor.witness import Job

LOSSES = """cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div
binary_cross_entropy binary_cross_entropy_with_logits""".split()


class Feed:
    """hungry: called if one process wants more than the ranks had."""

    def __init__(self, job: "Job", hungry: Callable[[], None]) -> None:
        self.given = [job.read("feed", who) for who in job.fed]
        self.apart, self.hungry = job.apart, hungry
        self.joins = len(self.given) > 1 and not job.apart
        self.noted: dict[str, Any] = {"inputs": [], "targets": [], "epochs": [], "lengths": {}}
        self.count = {"inputs": 0, "targets": 0}
        self.loaders: list[DataLoader[Any]] = []
        # By DataLoaders, if the ranks took a batch for each forward pass.
        self.by_loader = bool(self.given) and sum(
            len(batches) for _, _, batches in self.given[0]["epochs"]
        ) >= len(self.given[0]["inputs"])

    def turn(self, of: list[list[Any]], number: int) -> Any:
        """The number-th thing of one process, of what each rank had. None: there is no more."""
        if self.apart:
            rank, number = number % len(of), number // len(of)
            return [of[rank][number]] if number < len(of[rank]) else None
        return [each[number] for each in of if number < len(each)] or None

    def next(self, what: str) -> Any:
        taken = self.turn([given[what] for given in self.given], self.count[what])
        if taken is None:
            self.hungry()
        self.count[what] += 1
        return taken

    # ---- a model's inputs, a loss's targets ------------------------------------------------

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        leaves, spec = tree_flatten((args, kwargs))
        if self.given and not self.by_loader:
            leaves = [
                # What is as long as the first has examples first; a mask, say, has not.
                own if not is_data(own) else joined(each if len(each[0]) == rows else each[:1])
                for taken in [self.next("inputs")]
                for rows in [len(next(filter(is_data, taken[0]), ()))]
                for own, *each in zip(leaves, *taken, strict=True)
            ]
        self.noted["inputs"].append([x.detach().clone() if is_data(x) else None for x in leaves])
        made: tuple[Any, Any] = tree_unflatten(leaves, spec)
        return made

    def target(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.given and not self.by_loader and is_data(target):
            target = joined(self.next("targets"))
        self.noted["targets"].append(target.detach().clone())
        return target

    # ---- a DataLoader's batches ------------------------------------------------------------

    def number(self, loader: DataLoader[Any]) -> int:
        if all(loader is not known for known in self.loaders):
            self.loaders.append(loader)
        return next(i for i, known in enumerate(self.loaders) if known is loader)

    def iterate(self, original: Callable[..., Any], loader: DataLoader[Any]) -> Iterator[Any]:
        number = self.number(loader)
        epoch = sum(of == number for of, _, _ in self.noted["epochs"])
        batches: list[Any] = []
        self.noted["epochs"].append(entry := [number, False, batches])
        if self.given and self.by_loader:
            return self.again(number, epoch)
        return self.note(original(loader), entry)

    def note(self, iterator: Iterator[Any], entry: list[Any]) -> Iterator[Any]:
        for batch in iterator:
            entry[2].append(deepcopy(batch))
            yield batch
        entry[1] = True  # it ended

    def again(self, number: int, epoch: int) -> Iterator[Any]:
        of = [[e for e in given["epochs"] if e[0] == number][epoch:][:1] for given in self.given]
        batches, index = [each[0][2] if each else [] for each in of], 0
        while (taken := self.turn(batches, index)) is not None:
            yield joined(taken)
            index += 1
        if not all(each and each[0][1] for each in of):
            self.hungry()

    def length(self, original: Callable[..., int], loader: DataLoader[Any]) -> int:
        number = self.number(loader)
        if not self.apart and self.by_loader and number in self.given[0]["lengths"]:
            return int(self.given[0]["lengths"][number])
        length = self.noted["lengths"][number] = original(loader)
        return length

    def install(self, outside: Callable[[], bool]) -> None:
        """outside: whether no model is computed now."""
        loader: Any = DataLoader
        iterate, length = loader.__iter__, loader.__len__
        loader.__iter__ = lambda own: self.iterate(iterate, own)
        loader.__len__ = lambda own: self.length(length, own)
        for name in LOSSES:
            setattr(F, name, self.loss(getattr(F, name), outside))

    def loss(self, original: Callable[..., Any], outside: Callable[[], bool]) -> Callable[..., Any]:
        def loss(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if outside() and torch.is_grad_enabled() and input.requires_grad:
                target = self.target(input, target)
            return original(input, target, *args, **kwargs)

        return loss


def is_data(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not leaf.requires_grad and leaf.ndim > 0


def joined(values: list[Any]) -> Any:
    """The ranks' batches as one: examples first. (What has no examples is the first rank's.)"""
    first = values[0]
    if is_data(first):
        return torch.cat(values)
    if isinstance(first, Mapping):
        made: Any = copy(first)  # of its own class, such as a tokenizer's
        made.update({key: joined([value[key] for value in values]) for key in first})
        return made
    if isinstance(first, list | tuple):
        each = [joined(list(of)) for of in zip(*values, strict=True)]
        return type(first)(*each) if hasattr(first, "_fields") else type(first)(each)
    return first
