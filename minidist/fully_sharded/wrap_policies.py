"""Which modules become units of their own. Lesson: fully_sharded

A policy is a function of torch's form, `policy(module=..., recurse=..., nonwrapped_numel=...)`, so
torch's own serve as well, such as `ModuleWrapPolicy` and `size_based_auto_wrap_policy`. With
`recurse` it says whether to look into a module; without, whether to wrap it, of which
`nonwrapped_numel` parameters are in no unit yet.
"""

from collections.abc import Callable
from functools import partial

from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from minidist.fully_sharded.fsdp_module import group_of

Policy = Callable[..., bool]
# These use the weights of their parts without calling these, so hooks of a part would never run.
WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def by_class(*classes: type[nn.Module]) -> Policy:
    """A policy that wraps all modules of these classes, such as the blocks of a transformer; not
    what is within torch's `nn.TransformerEncoderLayer` and `nn.MultiheadAttention`, which read the
    parameters of their parts themselves. Lesson: fully_sharded"""
    return ModuleWrapPolicy(classes)


def by_size(min_num_params: int) -> Policy:
    """A policy that wraps modules, the inner ones first, that have so many parameters which are in
    no unit yet. Lesson: fully_sharded"""
    return partial(size_based_auto_wrap_policy, min_num_params=min_num_params)


def chosen(module: nn.Module, policy: Policy) -> dict[str, nn.Module]:
    """The modules within this one that the policy wants to be units, by name: inner ones first."""
    found: dict[str, nn.Module] = {}

    def look(module: nn.Module, name: str, top: bool) -> int:
        """How many parameters are in units, in the end."""
        if group_of(module) is not None or module in found.values():
            return _numel(module)
        numel, wrapped = _numel(module), 0
        if not policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0
        for child_name, child in () if isinstance(module, WHOLE) else module.named_children():
            wrapped += look(child, f"{name}.{child_name}".lstrip("."), False)
        left = numel - wrapped
        if top or not policy(module=module, recurse=False, nonwrapped_numel=left):
            return wrapped
        found[name] = module
        return numel

    look(module, "", True)
    return found


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
