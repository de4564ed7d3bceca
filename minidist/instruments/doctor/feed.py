"""What a script trains on: noted on a rank, and given to the one process.

If DataLoaders give a batch for each forward pass, these. Otherwise what goes into the model, and
the targets that go into torch's losses. One process has the ranks' batches joined, examples first.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from minidist.instruments.doctor.witness import Job

LOSSES = """cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div
binary_cross_entropy binary_cross_entropy_with_logits""".split()
END = "the end of an epoch"


class Feed:
    """noted: lists of what there was, by "inputs", "targets", or a loader's number and epoch.
    hungry: called if one process wants more than the ranks had."""

    def __init__(self, job: "Job", hungry: Callable[[], None]) -> None:
        self.given = [job.read("feed", who) for who in job.fed]
        self.apart, self.hungry = job.apart, hungry
        self.joins = len(self.given) > 1 and not job.apart
        self.noted: dict[Any, list[Any]] = defaultdict(list)
        self.taken: Counter[Any] = Counter()
        self.loaders: list[DataLoader[Any]] = []
        # A batch for each forward pass.
        first = self.given[0] if self.given else {}
        batches = sum(len(first[key]) for key in first if isinstance(key, tuple))
        self.by_loader = bool(first) and batches >= len(first["inputs"])

    def take(self, key: Any) -> Any:
        """The next thing of one process."""
        of, number = [given.get(key, []) for given in self.given], self.taken[key]
        self.taken[key] += 1
        if self.apart:
            of, number = [of[number % len(of)]], number // len(of)
        there = [each[number] for each in of if number < len(each)]
        if not there:
            self.hungry()
        return joined([each for each in there if not isinstance(each, str)] or [END])

    # ---- a model's inputs, a loss's targets ------------------------------------------------

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        leaves, spec = tree_flatten((args, kwargs))
        if self.given and not self.by_loader:
            new = self.take("inputs")
            leaves = [x if is_data(own) else own for own, x in zip(leaves, new, strict=True)]
        self.noted["inputs"].append([x.detach().clone() if is_data(x) else None for x in leaves])
        made: tuple[Any, Any] = tree_unflatten(leaves, spec)
        return made

    def loss(self, original: Callable[..., Any], outside: Callable[[], bool]) -> Callable[..., Any]:
        def loss(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if outside() and torch.is_grad_enabled() and input.requires_grad and is_data(target):
                if self.given and not self.by_loader:
                    target = self.take("targets")
                self.noted["targets"].append(target.clone())
            return original(input, target, *args, **kwargs)

        return loss

    # ---- a DataLoader's batches ------------------------------------------------------------

    def number(self, loader: DataLoader[Any]) -> int:
        if all(loader is not known for known in self.loaders):
            self.loaders.append(loader)
        return next(i for i, known in enumerate(self.loaders) if known is loader)

    def iterate(self, original: Callable[..., Any], loader: DataLoader[Any]) -> Iterator[Any]:
        number = self.number(loader)
        key = number, self.taken[number]  # the epoch
        self.taken[number] += 1
        if self.by_loader:
            while (batch := self.take(key)) is not END:
                yield batch
            return
        for batch in original(loader):
            self.noted[key].append(deepcopy(batch))
            yield batch
        self.noted[key].append(END)

    def length(self, original: Callable[..., int], loader: DataLoader[Any]) -> int:
        key = self.number(loader)
        if self.by_loader and not self.apart and key in self.given[0]:
            return int(self.given[0][key][0])
        self.noted[key].append(original(loader))
        return int(self.noted[key][-1])

    def install(self, outside: Callable[[], bool]) -> None:
        """outside: whether no model is computed now."""
        loader: Any = DataLoader
        iterate, length = loader.__iter__, loader.__len__
        loader.__iter__ = lambda own: self.iterate(iterate, own)
        loader.__len__ = lambda own: self.length(length, own)
        for name in LOSSES:
            setattr(F, name, self.loss(getattr(F, name), outside))


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
