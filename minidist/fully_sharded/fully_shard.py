"""`fully_shard`, torch's form: it makes a unit of a module, in place. Lesson: fully_sharded"""

import copy
from collections.abc import Callable, Iterable, Iterator, Set
from functools import cache, partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from minidist import rank
from minidist.common import agree
from minidist.common.groups import groups_of
from minidist.common.guard import Abandoned, abandon
from minidist.common.replicas import broadcast_state, require_same_lines, words
from minidist.distributed_data_parallel import DistributedDataParallel
from minidist.fully_sharded.flat.fully_sharded_data_parallel import FullyShardedDataParallel
from minidist.fully_sharded.param_group import FlatShard, Options, ParamGroup
from minidist.fully_sharded.state import State, in_backward
from minidist.mixed import MixedParallel
from minidist.pipeline import Pipeline
from minidist.zero import ShardedDataParallel

M = TypeVar("M", bound=nn.Module)

STRATEGIES = (
    *(DistributedDataParallel, ShardedDataParallel, Pipeline, MixedParallel),
    FullyShardedDataParallel,
)
SHARDED = (
    "shards of it have taken its place. Make the optimizer after sharding, of the module's "
    "parameters()"
)
NOT_HERE = {
    "shard_placement_fn": "every parameter is divided by rows, Shard(0)",
    "dp_mesh_dims": "give the axes that shard as the mesh: mesh['replicas', 'shards']",
}
_OF_BUFFERS = "messages take memory from the backend's arena, or from torch"
REFUSED = {  # methods of torch's FSDPModule
    "set_requires_all_reduce": "the replicas' all_reduce follows each reduce_scatter: "
    "set_requires_gradient_sync(False) leaves out both",
    "set_custom_all_gather": "units are gathered by the process group",
    "set_custom_reduce_scatter": "gradients are reduced by the process group",
    "set_all_reduce_hook": "gradients are reduced by the process group",
    "set_post_optim_event": "there is no stream of its own that must wait",
    "set_force_sum_reduction_for_comms": "gradients are added up always, and scaled before",
    "set_reduce_scatter_unused_params": "a parameter that no rank used keeps .grad None",
    "set_reduce_scatter_max_input_buffers": "one reduce_scatter is in flight at a time",
    "set_separate_reduce_scatter_group": "one process group does both",
    "set_unshard_in_backward": "a unit that backward comes to is gathered",
    "set_allocate_memory_from_process_group_for_comm": _OF_BUFFERS,
    "set_symm_mem_for_comm": _OF_BUFFERS,
}


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    **not_here: Any,
) -> M:
    """Make a unit of `module`, in place: torch's `fully_shard`.

        for block in model.blocks:
            md.fully_shard(block)
        md.fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters())     # after, not before

    The parts first, then the whole, which gets the parameters that no part has. Each parameter
    becomes a DTensor of this rank's rows. So torch's own tools are right: its clipping, `p.norm()`,
    its optimizers, `get_optimizer_state_dict`, its checkpoints; `md.saving` as well. Every rank
    takes rank 0's values. A model on the device "meta" stays there: call `to_empty(device=...)`
    and fill the parameters after sharding; on the CPU each rank fills its rows by its own random
    numbers, so seed the ranks differently. `load_state_dict` takes DTensors, or whole tensors.

    mesh: of one axis; of two for hybrid sharding, (replicas, shards). None is all ranks.
    reshard_after_forward: False keeps the parameters for the backward pass. None is False for the
        outermost module, the root, with which the backward pass begins, and True for others.
    mp_policy, offload_policy: torch's. Shards on the CPU, for an optimizer there, too; `pin_memory`
        changes nothing.
    ignored_params: parameters that stay as they are on each rank.

    Returns the module, of a class that is an `FSDPModule` as well. All ranks must call all units;
    a unit that only some call is an error on the backend "shm", and may hang, or mix up units of
    one size, on others. Raises ValueError or TypeError for what else torch takes, for a list of
    modules, for a parameter without dimensions, and if the ranks have different modules.

    Zhao et al. (arXiv 2304.11277). Lesson: fully_sharded
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard takes one module, not {type(module).__name__}")
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise ValueError(f"a {type(module).__name__} has no forward pass: shard what is in it")
    if group_of(module) is not None:
        raise ValueError(f"this {type(module).__name__} is sharded already")
    for name, value in not_here.items():
        if name not in NOT_HERE:
            raise TypeError(f"fully_shard has no argument {name}")
        if value is not None:
            raise ValueError(f"fully_shard: {name}: {NOT_HERE[name]}")
    if not isinstance(reshard_after_forward, bool | None):
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward}: parameters are freed after the "
            "forward pass, or not. They cannot be resharded to a smaller group of ranks"
        )
    groups = groups_of(None, mesh, "fully_shard", most_axes=2)
    options = Options(
        mesh or DeviceMesh.from_group(groups[0], rank.device().type),
        groups,
        _of_type("mp_policy", mp_policy, MixedPrecisionPolicy) or MixedPrecisionPolicy(),
        reshard_after_forward,
        isinstance(_of_type("offload_policy", offload_policy, OffloadPolicy), CPUOffloadPolicy),
        frozenset(ignored_params or ()),
    )
    _require_alike(module, options)
    own = list(_own_modules(module))
    tensors = [t for _, m in own for t in (*m._parameters.values(), *m._buffers.values())]
    given = {t: None for t in tensors if t is not None and t not in options.ignored}
    for replicas in groups[::-1]:
        broadcast_state([tensor for tensor in given if not tensor.is_meta], replicas)
    modules = [each for _, each in own]
    group = ParamGroup(module, modules, list(_flatten(own, options)), options)
    module.__dict__["fsdp_group"] = group
    module.__class__ = _sharded_class(type(module))  # type: ignore[assignment, arg-type]
    module.register_load_state_dict_pre_hook(_distribute)
    module.register_load_state_dict_post_hook(_take_assigned)
    _share_state(module)
    return module


class RefusedError(NotImplementedError, AttributeError):
    """A method of torch's that has no meaning here: `hasattr` says that there is none."""


class FSDPModule(nn.Module):
    """What a module is, besides its own class, when a unit begins with it. Torch's methods that
    have no meaning here raise NotImplementedError, with the reason. Lesson: fully_sharded"""

    fsdp_group: ParamGroup
    fsdp_state: State

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Its own, between gathering its parameters and freeing them."""
        return self.fsdp_state.run(self.fsdp_group, super().__call__, inputs, kwargs)

    # ---- as torch has them -----------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> "UnshardHandle | None":
        """Gather this unit's parameters: its modules have them, whole, until its forward pass or
        `reshard`. They are copies: what is written into them is lost. async_op: only begin, and
        return a handle with `wait()`."""
        self.fsdp_group.unshard()
        self.fsdp_group.pinned = True
        handle = UnshardHandle(self.fsdp_group)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's full parameters, unless its forward or backward pass goes on."""
        self.fsdp_group.reshard()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """False: the backward passes that follow reduce nothing. The `.grad` of a parameter is then
        whole on each rank, a DTensor with the placement Partial, and the next pass with True
        reduces the sum. Set it alike on all ranks. (A penalty on the parameters, in the loss, goes
        into a pass that reduces: DTensor cannot add its gradient to a Partial one.)"""
        for group in self._groups(recurse):
            group.syncs = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Changes nothing: each backward pass has reduced its gradients when it returns."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether the parameters are freed after the forward pass."""
        for group in self._groups(recurse):
            group.reshards = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether the parameters are freed after the backward pass. If not, the next forward pass
        uses them as they are, unless an optimizer has changed their shards since."""
        for group in self._groups(recurse):
            group.reshards_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """What to gather while this unit computes forward, in place of the next unit."""
        self.fsdp_group.next_forward = [module.fsdp_group for module in modules]

    def set_modules_to_backward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """What to gather while this unit computes backward, in place of the next unit."""
        self.fsdp_group.next_backward = [module.fsdp_group for module in modules]

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's sums of gradients by it, in place of the number of ranks."""
        self.fsdp_group.divisor = factor

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    @property
    def unsharded(self) -> list[torch.Tensor]:
        """Where this unit's full parameters are while they are gathered, one tensor for each dtype;
        without memory while they are not."""
        return [flat.full for flat in self.fsdp_group.flats]

    def _groups(self, recurse: bool) -> list[ParamGroup]:
        return groups_in(self) if recurse else [self.fsdp_group]

    def __getattr__(self, name: str) -> Any:
        if name in REFUSED:
            raise RefusedError(f"{name}: {REFUSED[name]}")
        return super().__getattr__(name)

    # ---- moved, copied, loaded -------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self.fsdp_state.running or in_backward():
            raise RuntimeError("a sharded module cannot be moved or converted while it computes")
        self.fsdp_group.reshard()
        super()._apply(fn, recurse)  # those within it do the same
        self.fsdp_group.adopt()
        self.fsdp_state.watch()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """One on the same ranks, with shards of its own, without gradients: for averaged weights.
        No rank needs the others for it."""
        if self.fsdp_state.running or in_backward():
            raise RuntimeError("a sharded module cannot be copied while it computes")
        for group in groups_in(self):
            group.reshard()
            memo[id(group.options)] = group.options
            memo |= {id(flat.group): flat.group for flat in group.flats}
            for each in group.parameters:
                memo[id(each.sharded)] = _copy(each.sharded)
        new = memo[id(self)] = type(self).__new__(type(self))
        for name, value in vars(self).items():
            if name != "fsdp_state":
                new.__dict__[name] = copy.deepcopy(value, memo)
        _share_state(new)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises TypeError."""
        raise TypeError(
            "a fully sharded module has process groups and only a rank's shards, so torch.save "
            "cannot write it: save its state_dict()"
        )


class UnshardHandle:
    """Of `FSDPModule.unshard(async_op=True)`."""

    def __init__(self, group: ParamGroup) -> None:
        self._group = group

    def wait(self) -> None:
        """Until the full parameters are there, and give them to the modules."""
        self._group.pin()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have this method of a sharded module gather its parameters, as a forward pass does: torch's
    function. Does nothing for a module that is not sharded, as torch's. Raises AttributeError if
    there is no such method."""
    method: Callable[..., Any] = getattr(type(module), method_name)

    def within(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        return self.fsdp_state.run(self.fsdp_group, partial(method, self), inputs, kwargs)

    if group_of(module) is not None:
        setattr(module, method_name, MethodType(within, module))  # a deep copy binds it again


def group_of(module: nn.Module) -> ParamGroup | None:
    """The parameters of the unit that begins with this module, if one does."""
    return vars(module).get("fsdp_group")


def groups_in(module: nn.Module) -> list[ParamGroup]:
    """Those of all units that begin within it, the outer ones first."""
    return [group for group in map(group_of, module.modules()) if group is not None]


# ---- how a unit is made -----------------------------------------------------------------------


def _of_type(name: str, value: Any, kind: type) -> Any:
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} is a {kind.__name__}, not {value!r}")
    return value


@cache  # one for all blocks: torch.compile compiles a method once a class
def _sharded_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})


def _share_state(module: nn.Module) -> None:
    """The outermost unit so far is the root."""
    state = State(groups_in(module))
    for group in state.groups:
        group.module.__dict__["fsdp_state"] = state


def _own_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules of a unit, by name, the outer ones first: those that are in no unit within it.
    One that is there twice comes twice."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and group_of(child) is None:
            yield from _own_modules(child, f"{prefix}{name}.")


def _flatten(own: list[tuple[str, nn.Module]], options: Options) -> Iterator[FlatShard]:
    """One flat shard for each dtype. The modules get DTensors in place of their parameters."""
    found: dict[nn.Parameter, list[tuple[str, tuple[nn.Module, str]]]] = {}
    for prefix, module in own:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in options.ignored:
                found.setdefault(parameter, []).append((prefix + name, (module, name)))
    alike: dict[Any, list[Any]] = {}
    for p, places in found.items():
        named = tuple(name for name, _ in places), tuple(place for _, place in places), p
        alike.setdefault((p.dtype, p.device), []).append(named)
    for (_, device), together in alike.items():
        flat = FlatShard(together, options, device)
        for each in flat.parameters:
            each.put(each.sharded)
        for _, _, parameter in together:
            abandon(parameter, SHARDED)
        yield flat


def _require_alike(module: nn.Module, options: Options) -> None:
    """Raises on every rank if the ranks do not have the same units of the same tensors, or one has
    a module that cannot be sharded."""
    with agree.together(*options.groups):
        lines = list(_describe(module, options.ignored))
    problem: Exception | None = None
    for group in options.groups:
        try:
            require_same_lines(lines, group)
        except ValueError as error:
            problem = error
    agree.pass_on_along(options.groups, problem)


def _describe(module: nn.Module, ignored: Set[nn.Parameter]) -> Iterator[str]:
    for name, each in module.named_modules():
        if isinstance(each, STRATEGIES):
            raise ValueError(
                f"{name or 'the module'} is a {type(each).__name__}, which sees to its gradients "
                "itself, and would find only shards: shard the model without it"
            )
        if group_of(each) is not None:
            yield f"unit {name}"
    taken = {each.sharded for group in groups_in(module) for each in group.parameters}
    for prefix, owner in _own_modules(module):
        for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is None or tensor in ignored:
                continue
            if isinstance(tensor, Abandoned) or tensor in taken:
                raise ValueError(
                    f"parameter {prefix + name} is also in another unit, or was: modules that "
                    "share a parameter must be in the same unit"
                )
            trained = isinstance(tensor, nn.Parameter)
            if trained and tensor.ndim == 0:
                raise ValueError(
                    f"parameter {prefix + name} has no dimension, and so no rows to divide: give "
                    "it the shape (1,), or pass it in ignored_params"
                )
            yield words("parameter" if trained else "buffer", prefix + name, tensor)


def _copy(parameter: nn.Parameter) -> nn.Parameter:
    like: Any = parameter
    new = nn.Parameter(
        DTensor(like._local_tensor.clone(), like._spec, requires_grad=False),
        parameter.requires_grad,
    )
    new.__dict__.update({k: v for k, v in vars(parameter).items() if k not in vars(new)})
    return new


def _distribute(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a unit is loaded: of whole tensors this rank's rows. No rank needs the others."""
    group = module.fsdp_group
    for each in group.parameters:
        for name in (prefix + name for name in each.names):
            value = state.get(name)
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                if value.shape == each.sharded.shape:  # else torch says what does not fit
                    state[name] = distribute_tensor(
                        value, group.options.mesh, group.options.placements, src_data_rank=None
                    )


def _take_assigned(module: Any, _: Any) -> None:
    """After a unit is loaded with assign=True, as a model on "meta" is by torch's functions."""
    places = [(each, *each.places[0]) for each in module.fsdp_group.parameters]
    if any(owner._parameters[name] is not each.sharded for each, owner, name in places):
        module.fsdp_group.adopt()
        module.fsdp_state.watch()
