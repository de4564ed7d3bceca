"""A module around a module: what each strategy is to its user.

A checkpoint must not depend on the strategy. So the names in `state_dict()` are those of the bare
module, and the checkpoint loads in any other strategy, and without one. And a strategy averages or
shards the parameters that it found: `require_as_found` names one that was changed since.
"""

import copy
from collections.abc import Iterable, Set
from inspect import get_annotations
from typing import Any

import torch
from torch import nn

from minidist.common.replicas import copy_marks

MODULE = "module."


class Wrapper(nn.Module):
    """A module around `module`, to be used in its place.

    The attributes of `module` can be read and written through it, but for those that the wrapper's
    class declares, by a value or an annotation; and for methods, where gradients are averaged. A
    layer or parameter that is added becomes the module's. Its `state_dict` reads and writes the
    names of `module` itself, on its own and as a part of a larger module; a checkpoint of torch's
    DistributedDataParallel, with "module." before each name, loads too.
    """

    module: nn.Module

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
        if self._is_ours(name, isinstance(value, nn.Module | nn.Parameter)):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_ours(name):
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def _is_ours(self, name: str, part: bool = False) -> bool:
        """Whether this is an attribute of the wrapper. part: it is to be a part of a model."""
        if name.startswith("_") or hasattr(type(self), name):
            return True
        known = [vars(self), self._modules, self._parameters, self._buffers]
        known += [get_annotations(kind) for kind in type(self).__mro__]
        if any(name in names for names in known):
            return True
        return not part and not hasattr(self.module, name)


def copy_on_ranks(wrapper: Any, memo: dict[int, Any], *same: Any) -> Any:
    """For `__deepcopy__`: a copy that shares with the wrapper what is the `same`, as groups are."""
    for each in same:
        memo[id(each)] = each
    memo[id(wrapper)] = copied = wrapper.__class__.__new__(wrapper.__class__)
    copied.__setstate__(copy.deepcopy(wrapper.__getstate__(), memo))
    copy_marks(wrapper.parameters(), copied.parameters())
    return copied


# ---- checkpoints -------------------------------------------------------------------------------


def _without_prefix(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    _rename(state, prefix + MODULE, prefix)
    _rename(getattr(state, "_metadata", {}), prefix + MODULE, prefix)  # of each module, its version


def _with_prefix(
    wrapper: nn.Module, state: dict[str, Any], prefix: str, _: Any, __: Any, *problems: list[str]
) -> None:
    wrapper.__dict__["_loading"] = prefix, problems
    names = [name.removeprefix(prefix) for name in state if name.startswith(prefix)]
    own = _own_names(wrapper)
    if "module" not in own:
        for name in names:
            # What torch's set_model_state_dict adds to the given state: our own.
            state.pop(prefix + MODULE + name, None)
        names = [name for name in names if prefix + name in state]
    # A checkpoint of torch's DistributedDataParallel has one "module." more than the module has.
    torchs = bool(names) and all(name.startswith(MODULE) for name in names)
    if torchs and "module" in own:
        torchs = all(name.split(".")[1] in own for name in names)
    if not torchs:
        _rename(state, prefix, prefix + MODULE)


def _tell_without_prefix(wrapper: nn.Module, _: Any) -> None:
    """After a load: what is missing, unexpected or wrong has the names that the user knows."""
    prefix, problems = wrapper.__dict__.pop("_loading")
    for found in problems:
        found[:] = [words.replace(prefix + MODULE, prefix, 1) for words in found]


def _own_names(wrapper: nn.Module) -> set[str]:
    """What the module that is not a wrapper has directly."""
    inner: Any = wrapper
    while isinstance(inner, Wrapper):
        inner = inner.module
    return {*inner._modules, *inner._parameters, *inner._buffers}


def _rename(entries: dict[str, Any], old: str, new: str) -> None:
    """Replace the prefix `old` of the keys by `new`, and keep the entries' order. A module's own
    key is its prefix without the dot."""
    for key in [key for key in entries if f"{key}.".startswith(old)]:
        entries[(new + f"{key}.".removeprefix(old)).rstrip(".")] = entries.pop(key)


# ---- a model as it was found -----------------------------------------------------------------

Kinds = dict[str, tuple[Any, ...]]


def kinds_of(parameters: Iterable[tuple[str, nn.Parameter]]) -> Kinds:
    """By name, what must stay as it is: which parameter it is, its shape, dtype and device."""
    return {name: (id(p), p.shape, p.dtype, p.device) for name, p in parameters}


def require_as_found(module: nn.Module, found: Kinds, left_out: Set[Any] = frozenset()) -> None:
    """Raises RuntimeError if the module trains a parameter that was not `found` in it, nor is among
    what was left out, by name or itself."""
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    now = kinds_of((name, p) for name, p in trained if name not in left_out and p not in left_out)
    changed = [name for name, kind in now.items() if found.get(name) != kind]
    if changed:
        raise RuntimeError(
            f"parameter {changed[0]} was added, replaced, unfrozen or converted since its model "
            "was wrapped. Change a model first, and wrap it then"
        )


def in_backward() -> bool:
    """Whether autograd runs a backward pass now, in which a checkpoint computes forward again."""
    return torch._C._current_graph_task_id() != -1
