"""What every strategy of the course is to its user: the module that it wraps, and then some.

Lessons 3 to 9 each wrap a module. A checkpoint must not tell which one was in use: the names in
`state_dict()` are those of the bare module, so it loads in any other strategy, and without one.
"""

from typing import Any

from torch import nn


class Wrapper(nn.Module):
    """A module around `module`. Its `state_dict` reads and writes the names of `module` itself,
    on its own and as a part of a larger module."""

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.register_state_dict_post_hook(_without_prefix)
        self.register_load_state_dict_pre_hook(_with_prefix)


def _without_prefix(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    _rename(state, prefix + "module.", prefix)
    metadata = getattr(state, "_metadata", {})  # of each module, its version
    for key in [key for key in metadata if f"{key}.".startswith(prefix + "module.")]:
        name = prefix + f"{key}.".removeprefix(prefix + "module.")
        metadata[name.rstrip(".")] = metadata.pop(key)


def _with_prefix(_: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    _rename(state, prefix, prefix + "module.")


def _rename(entries: dict[str, Any], old: str, new: str) -> None:
    """Replace the prefix `old` of the keys by `new`, and keep the entries' order."""
    for key in [key for key in entries if key.startswith(old)]:
        entries[new + key.removeprefix(old)] = entries.pop(key)
