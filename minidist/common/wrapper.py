"""A module around a module: what each strategy is to its user.

A checkpoint must not depend on the strategy. So the names in `state_dict()` are those of the bare
module, and the checkpoint loads in any other strategy, and without one. And a strategy averages or
shards the parameters that it found: `Guard` names one that was changed since.
"""

import copy
from collections.abc import Iterable, Iterator, Set
from inspect import get_annotations
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NoReturn

import torch
from torch import nn

from minidist.common.refusals import has_hooks
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


def require_as_found(module: nn.Module, found: Kinds, left_out: Set[str] = frozenset()) -> None:
    """Raises RuntimeError if the module trains a parameter that was not `found` in it."""
    now = kinds_of((name, p) for name, p in module.named_parameters() if p.requires_grad)
    changed = [n for n, kind in now.items() if found.get(n) != kind and n not in left_out]
    if changed:
        raise RuntimeError(
            f"parameter {changed[0]} was added, replaced, unfrozen or converted since its model was "
            "wrapped. Change a model first, and wrap it then"
        )


def in_backward() -> bool:
    """Whether autograd runs a backward pass now, in which a checkpoint computes forward again."""
    return torch._C._current_graph_task_id() != -1


# ---- parameters that changed -------------------------------------------------------------------

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
        layers: Set[nn.Module] = frozenset(),
    ) -> None:
        """frozen_too: those that are frozen now are `who`'s as well, and may be trained later.
        layers: of the module, which `who` runs itself, see `require_same_layers`."""
        self._module, self._who, self._ignored = module, who, ignored
        self._above = [(*each, dict(each[1]._modules)) for each in _above("", module, layers)]
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

    def require_same_layers(self, module: nn.Module) -> None:
        """Raises RuntimeError if one was added, removed or replaced, or if a wrapper has another
        `module` now, such as a compiled one: `who` would run the old ones. Within a layer a module
        may be replaced. And for a hook of what holds the layers, which `who` does not call."""
        if module is not self._module:
            raise RuntimeError(
                "the module has been replaced since it was wrapped, and would not be run: "
                f"{self._who} runs the layers that it found. Change or compile single layers "
                "first, and wrap the model then"
            )
        for prefix, holder, before in self._above:
            now = holder._modules
            if has_hooks(holder):
                raise RuntimeError(
                    f"{prefix[:-1] or 'the module'} has a hook, which would not be called: "
                    f"{self._who} runs its layers one by one. Register the hook on a layer"
                )
            # What else a module gets, such as a loss function, is no layer.
            in_a_row = isinstance(holder, nn.Sequential | nn.ModuleList)
            for name in before | now if in_a_row else before:
                if now.get(name) is not before.get(name):
                    raise RuntimeError(
                        f"layer {prefix}{name} has been added, removed or replaced since it was "
                        f"wrapped. Change a module first, and wrap it then: {self._who} runs the "
                        "layers that it found"
                    )

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


def _above(
    prefix: str, module: nn.Module, layers: Set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """The modules that hold the layers, and are none themselves, with the prefix of their names.
    None without layers."""
    if layers and module not in layers:
        yield prefix, module
        for name, child in module.named_children():
            yield from _above(f"{prefix}{name}.", child, layers)


def _tell(kind: tuple[Any, ...]) -> str:
    shape, dtype, device = kind
    return f"shape {tuple(shape)}, {str(dtype).removeprefix('torch.')}, on {device}"
