"""Data in an order that depends on no world size (lesson: surviving_failures)."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from minidist.common.groups import require_group


class Batches:
    """This rank's share of batch after batch, without end, in an order that can go on anywhere.

        batches = md.saving.Batches(dataset, batch_size=64)
        for step, (inputs, targets) in zip(range(1000), batches):
            ...

    Each epoch has every example once, in an order that only `seed` and the number of the epoch
    say. A batch may begin in one epoch and end in the next, so all are full. `batch_size` counts
    the examples of all ranks together, of which rank r of N takes every N-th, from the r-th on. So
    batch k is the same on any number of ranks, and `state_dict()` is one number: the examples
    behind it.

    dataset: any with a length. seed: of the shuffling; None is the dataset's own order.
    process_group: the ranks that share a batch; None is the default group, or this process alone.
        On a mesh that is `mesh.get_group("data")`.
    options: those of torch's DataLoader, such as `num_workers`. Batches that workers have read
        ahead do not count before they are handed out.

    Raises ValueError if the ranks cannot share a batch evenly, or the dataset is empty.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        seed: int | None = 0,
        process_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        alone = process_group is None and not (dist.is_available() and dist.is_initialized())
        group = None if alone else require_group(process_group, "Batches")
        self._rank = 0 if group is None else dist.get_rank(group)
        self._ranks = 1 if group is None else dist.get_world_size(group)
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self._length, self._options = len(dataset), options  # type: ignore[arg-type]
        if batch_size < 1 or batch_size % self._ranks:
            raise ValueError(f"{self._ranks} ranks cannot share batches of {batch_size} evenly")
        if not self._length:
            raise ValueError("the dataset is empty")
        self.examples = 0  # handed out so far, on all ranks together

    @property
    def epoch(self) -> int:
        """Of the next example."""
        return self.examples // self._length

    def __iter__(self) -> Iterator[Any]:
        """From where the last one has stopped."""
        # A DataLoader draws a number when it begins, which seeds its workers. Of the default
        # generator, that would shift the random numbers of a run that has begun again.
        seed = (self.seed or 0) * 1_000_003 + self.examples * self._ranks + self._rank
        options: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed % 2**63)}
        loader = DataLoader(self.dataset, batch_sampler=self._shares(), **options | self._options)
        for batch in loader:
            self.examples += self.batch_size  # before: who saves now has trained on this batch
            yield batch

    def _shares(self) -> Iterator[list[int]]:
        order, of_epoch = torch.empty(0), -1
        at = self.examples
        while True:
            own = []
            for number in range(at + self._rank, at + self.batch_size, self._ranks):
                epoch, place = divmod(number, self._length)
                if epoch != of_epoch:
                    order, of_epoch = self._order(epoch), epoch
                own.append(int(order[place]))
            yield own
            at += self.batch_size

    def _order(self, epoch: int) -> torch.Tensor:
        if self.seed is None:
            return torch.arange(self._length)
        mixed = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(self._length, generator=mixed)

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank."""
        return {"examples": self.examples, "seed": self.seed, "length": self._length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. Raises ValueError for a state of other data."""
        for name, ours in (("seed", self.seed), ("length", self._length)):
            if state[name] != ours:
                raise ValueError(f"the data's {name} was {state[name]}, and is {ours} now")
        self.examples = state["examples"]
