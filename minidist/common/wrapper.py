"""A module around a module: what each strategy is to its user.

A checkpoint must not depend on the strategy. So the names in `state_dict()` are those of the bare
module, and the checkpoint loads in any other strategy, and without one.
"""

import copy
from functools import wraps
from typing import Any

from torch import nn

MODULE = "module."


class Wrapper(nn.Module):
    """A module around `module`, to be used in its place.

    Its attributes are those of `module` as well, to read and to write, but for those that are its
    own, and for private ones to write. Its `state_dict` reads and writes the names of
    `module` itself, on its own and as a part of a larger module; a checkpoint of torch's
    DistributedDataParallel, with "module." before each name, loads too.
    """

    module: nn.Module
    _is_made = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """What an `__init__` writes is the wrapper's, whatever names `module` has."""
        super().__init_subclass__(**kwargs)
        make: Any = cls.__init__

        @wraps(make)
        def made(self: Any, *args: Any, **kwargs: Any) -> None:
            make(self, *args, **kwargs)
            if type(self) is cls:
                self._is_made = True

        cls.__init__ = made  # type: ignore[method-assign]

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.register_state_dict_post_hook(_without_prefix)
        self.register_load_state_dict_pre_hook(_with_prefix)
        self.register_load_state_dict_post_hook(_tell_without_prefix)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get("module")
            # What Python itself asks for, such as __deepcopy__, is about the wrapper.
            if inner is None or name.startswith("__"):
                raise
            return self._forwarded(name, getattr(inner, name))

    def _forwarded(self, name: str, found: Any) -> Any:
        """What a user gets for this attribute of the module."""
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        if self._keeps(name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if self._keeps(name):
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def _keeps(self, name: str) -> bool:
        """Whether this is, or becomes, an attribute of ours."""
        if name.startswith("_") or not self._is_made or hasattr(type(self), name):
            return True
        tables = (vars(self), self._modules, self._parameters, self._buffers)
        return any(name in table for table in tables)


def copy_on_ranks(wrapper: Any, memo: dict[int, Any], *same: Any) -> Any:
    """For `__deepcopy__`: a copy that shares with the wrapper what is the `same`, as groups are."""
    for each in same:
        memo[id(each)] = each
    memo[id(wrapper)] = copied = wrapper.__class__.__new__(wrapper.__class__)
    copied.__setstate__(copy.deepcopy(wrapper.__getstate__(), memo))
    return copied


def _without_prefix(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    _rename(state, prefix + MODULE, prefix)
    metadata = getattr(state, "_metadata", {})  # of each module, its version
    for key in [key for key in metadata if f"{key}.".startswith(prefix + MODULE)]:
        name = prefix + f"{key}.".removeprefix(prefix + MODULE)
        metadata[name.rstrip(".")] = metadata.pop(key)


def _with_prefix(
    wrapper: nn.Module, state: dict[str, Any], prefix: str, _: Any, __: Any, *problems: list[str]
) -> None:
    wrapper.__dict__["_loading"] = prefix, problems
    if "module" not in _own_names(wrapper):
        for key in [key for key in state if key.startswith(prefix)]:
            # What torch's set_model_state_dict adds to the given state: our own.
            state.pop(prefix + MODULE + key.removeprefix(prefix), None)
    if not _is_torchs(
        wrapper, [key.removeprefix(prefix) for key in state if key.startswith(prefix)]
    ):
        _rename(state, prefix, prefix + MODULE)


def _tell_without_prefix(wrapper: nn.Module, _: Any) -> None:
    """After a load: what is missing, unexpected or wrong has the names that the user knows."""
    prefix, problems = wrapper.__dict__.pop("_loading")
    for told in problems:
        told[:] = [words.replace(prefix + MODULE, prefix, 1) for words in told]


def _is_torchs(wrapper: nn.Module, names: list[str]) -> bool:
    """Whether these are the names of a checkpoint of torch's DistributedDataParallel: each has one
    "module." more than the module has."""
    if not names or not all(name.startswith(MODULE) for name in names):
        return False
    own = _own_names(wrapper)
    return "module" not in own or all(name.split(".")[1] in own for name in names)


def _own_names(wrapper: nn.Module) -> set[str]:
    """What the module that is not a wrapper has directly."""
    inner: Any = wrapper
    while isinstance(inner, Wrapper):
        inner = inner.module
    return {*inner._modules, *inner._parameters, *inner._buffers}


def _rename(entries: dict[str, Any], old: str, new: str) -> None:
    """Replace the prefix `old` of the keys by `new`, and keep the entries' order."""
    for key in [key for key in entries if key.startswith(old)]:
        entries[new + key.removeprefix(old)] = entries.pop(key)
