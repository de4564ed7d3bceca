"""The layers that a strategy runs one by one, as it has found them."""

from collections.abc import Iterator, Set

from torch import nn

from minidist.common.wrapper import has_hooks, kinds_of, require_as_found


class Found:
    """The layers that `who` has found in a module, and runs one by one; and its parameters that are
    trained. inside: the layers, with all that is in them; the other modules hold them."""

    def __init__(self, module: nn.Module, inside: Set[nn.Module], who: str) -> None:
        self._inside, self._who = inside, who
        trained = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
        self._parameters, self._layers = kinds_of(trained), dict(self._held(module))

    def _held(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for name, holder in module.named_modules(prefix="module"):
            if holder not in self._inside:
                yield name, holder
                yield from ((f"{name}.{child}", m) for child, m in holder.named_children())

    def require_unchanged(self, module: nn.Module, trains: bool = False) -> None:
        """Raises RuntimeError if a layer, or the whole module, was added, removed or replaced, such
        as by a compiled one; or if a module that holds layers has a hook; and, where it `trains`,
        if `require_as_found` does."""
        now, then = dict(self._held(module)), self._layers
        changed = [name for name in then | now if now.get(name) is not then.get(name)]
        holders = [name for name, m in then.items() if m not in self._inside and has_hooks(m)]
        if changed or holders:
            wrong = f"{changed[0]} was changed" if changed else f"{holders[0]} has a hook"
            raise RuntimeError(
                f"{wrong} since it was wrapped: {self._who} runs the layers that it found. Change "
                "or compile layers first, hook them and not what holds them, and wrap then"
            )
        if trains:
            require_as_found(module, self._parameters)
