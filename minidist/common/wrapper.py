"""A module around a module: what each strategy is to its user.

A checkpoint must not depend on the strategy. So the names in `state_dict()` are those of the bare
module, and the checkpoint loads in any other strategy, and without one. And a strategy averages or
shards the parameters that it found: `require_as_found` names one that was changed since.
"""

import copy
from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import nn

MODULE = "module."


class Wrapper(nn.Module):
    """A module around `module`, to be used in its place.

    What it does not have itself, such as the methods and attributes of `module`, is read from that.
    Its `state_dict` reads and writes the names of `module`, on its own and as a part of a larger
    module.
    """

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.register_state_dict_post_hook(_without_prefix)
        self.register_load_state_dict_pre_hook(_with_prefix)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get("module")
            # What Python itself asks for, such as __deepcopy__, is about the wrapper.
            if inner is None or name.startswith("__"):
                raise
            return getattr(inner, name)


def copy_sharing(wrapper: Any, memo: dict[int, Any], *shared: Any) -> Any:
    """For `__deepcopy__`: a copy that has the very `shared` objects, such as groups, and copies of
    all else."""
    for each in shared:
        memo[id(each)] = each
    memo[id(wrapper)] = copied = wrapper.__class__.__new__(wrapper.__class__)
    copied.__setstate__(copy.deepcopy(wrapper.__getstate__(), memo))
    return copied


# ---- checkpoints -------------------------------------------------------------------------------


def _without_prefix(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    _rename(state, prefix + MODULE, prefix)
    _rename(getattr(state, "_metadata", {}), prefix + MODULE, prefix)  # of each module, its version


def _with_prefix(_: Any, state: dict[str, Any], prefix: str, *__: Any) -> None:
    for name in [name.removeprefix(prefix) for name in state if name.startswith(prefix)]:
        # torch's set_model_state_dict adds our names to what it was given
        state.pop(prefix + MODULE + name, None)
    _rename(state, prefix, prefix + MODULE)


def _rename(entries: dict[str, Any], old: str, new: str) -> None:
    """Replace the prefix `old` of the keys by `new`, and keep the entries' order. A module's own
    key is its prefix without the dot."""
    for key in [key for key in entries if f"{key}.".startswith(old)]:
        entries[(new + f"{key}.".removeprefix(old)).rstrip(".")] = entries.pop(key)


# ---- a model as it was found -----------------------------------------------------------------

Kinds = dict[str, tuple[Any, ...]]


def kinds_of(parameters: Iterable[tuple[str, nn.Parameter]]) -> Kinds:
    """By name, what must stay as it is: which parameter it is, its shape, dtype and device."""
    # In a set, which compares by identity. It holds p, and a deepcopy of it holds the copy's.
    return {name: ({p}, p.shape, p.dtype, p.device) for name, p in parameters}


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
