"""Parameters that changed after a strategy has taken them: one guard for all strategies.

A strategy averages, shards or cuts the parameters that it found when it wrapped the module. A
parameter that is added later would train on each rank alone, and the replicas would drift apart
without a word. An optimizer with a parameter that was replaced would train nothing. Both raise an
error that names the parameter.
"""

from collections.abc import Iterable, Iterator, Set
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NoReturn

import torch
from torch import nn

_kind = attrgetter("shape", "dtype", "device")
_is_trained = attrgetter("requires_grad")


class Guard:
    """Notices when the parameters of `module` are no longer those that `who` has found in it: one
    was added, replaced, removed or unfrozen, or is another kind of tensor.

    A check takes about half a microsecond a parameter. It compares what is in the modules' own
    tables, and builds no names. To freeze a parameter for a while, to rename one, or to add a
    frozen one is no change. Parameters in `ignored` may do as they like.
    """

    def __init__(
        self,
        module: nn.Module,
        who: str,
        ignored: Set[nn.Parameter] = frozenset(),
        frozen_too: bool = False,
    ) -> None:
        """frozen_too: those that are frozen now are `who`'s as well, and may be trained later."""
        self._module, self._who, self._ignored = module, who, ignored
        named = module.named_parameters()
        trained = {p: name for name, p in named if p.requires_grad or frozen_too}
        self._trained = {p: name for p, name in trained.items() if p not in ignored}
        self._kinds = list(map(_kind, self._trained))
        self._look()

    def require_unchanged(self, module: nn.Module | None = None) -> None:
        """Raises RuntimeError that names the first parameter that changed, how, and what to do.
        `module`: what a wrapper has now, where its `module` may have been replaced."""
        module = self._module if module is None else module
        if module is not self._module or not self._is_as_seen():
            self._require_same_parameters(module)
            self._module = module
            self._look()
        now = list(map(_kind, self._trained))
        if now != self._kinds:
            for name, before, after in zip(self._trained.values(), self._kinds, now, strict=True):
                if before != after:
                    self._refuse(name, "changed", f", from {_tell(before)} to {_tell(after)}")

    def _look(self) -> None:
        """Remember what is where in the module."""
        modules: Iterator[Any] = self._module.modules()
        self._tables: list[dict[str, Any]] = [
            table for m in modules for table in (m._parameters, m._modules)
        ]
        self._seen = list(self._now())
        known = self._trained.keys() | self._ignored
        self._frozen = [p for p in self._module.parameters() if p not in known]

    def _now(self) -> Iterator[Any]:
        # With a mark at the end, so that one more or one less in the last table is seen.
        return chain(chain.from_iterable(map(dict.values, self._tables)), [self._trained])

    def _is_as_seen(self) -> bool:
        return all(map(is_, self._now(), self._seen)) and not any(map(_is_trained, self._frozen))

    def _require_same_parameters(self, module: nn.Module) -> None:
        now = {p: name for name, p in module.named_parameters()}
        names, frozen = set(self._trained.values()), set(self._frozen)
        known = self._trained.keys() | self._ignored
        for parameter, name in now.items():
            if parameter.requires_grad and parameter not in known:
                if parameter in frozen:
                    self._refuse(name, "been unfrozen")
                self._refuse(name, "been replaced" if name in names else "been added")
        for parameter, name in self._trained.items():
            if parameter not in now:
                self._refuse(name, "been replaced" if name in now.values() else "been removed")

    def _refuse(self, name: str, how: str, more: str = "") -> NoReturn:
        raise RuntimeError(
            f"parameter {name} has {how} since it was wrapped{more}. Change a module first, and "
            f"wrap it then: {self._who} trains the parameters that it found"
        )


def _tell(kind: tuple[Any, ...]) -> str:
    shape, dtype, device = kind
    return f"shape {tuple(shape)}, {str(dtype).removeprefix('torch.')}, on {device}"


class Abandoned(nn.Parameter):
    """A parameter that a strategy has replaced by shards. An optimizer that was made before still
    has it, and would pass over it at each step without a word."""

    why: str

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """Raises RuntimeError."""
        raise RuntimeError(f"this parameter is no more: {self.why}")


def abandon(parameter: nn.Parameter, why: str) -> None:
    """Free a parameter that the module no longer has. Its `.grad` then raises an error: `why`."""
    parameter.data = parameter.data.new_empty(0)
    parameter.grad = None
    parameter.__class__ = Abandoned
    parameter.why = why  # type: ignore[attr-defined]


def abandon_replaced(before: Iterable[nn.Parameter], module: nn.Module, why: str) -> None:
    """Abandon those parameters that `module` had before and no longer has."""
    kept = set(module.parameters())
    for parameter in before:
        if parameter not in kept:
            abandon(parameter, why)
