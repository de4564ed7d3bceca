"""A whole model that is split by features: cut it, check it, join it."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from minidist.common.abandoned import abandon_replaced
from minidist.common.agree import gather
from minidist.common.groups import groups_of, require_group
from minidist.common.tensors_in import local_of
from minidist.rank import device
from minidist.tensor_parallel.layer import ParallelLayer
from minidist.tensor_parallel.operators import Group
from minidist.tensor_parallel.plan import split_by
from minidist.tensor_parallel.ready_plans import transformer_plan
from minidist.tensor_parallel.styles import Where

WHO = "parallelize_module"
SPLIT = (
    "the model has been split by features, and this rank has a shard in its place. Make the "
    "optimizer after parallelize_module or MixedParallel, of the model's parameters()"
)


def split(
    model: nn.Module,
    mesh: DeviceMesh | Group = None,
    plan: Mapping[str, Any] | None = None,
    *,
    sequence_parallel: bool = False,
) -> nn.Module:
    """What `parallelize_module` does first, with its arguments: layers that hold this rank's shards
    take the places that the plan names. Lesson: mixed_parallelism.

    The shards are plain tensors, as `Pipeline` and `ZeroRedundancyOptimizer` take them. Torch's
    clipping, `nn.init` and checkpoints take them for whole ones, and are wrong; so are optimizers
    that look at more than one element at a time.

    mesh: of one axis; or a group, and None is the default one: then a plan may also have grouped
        queries in one layer, for whose shards DTensor has no word.
    """
    group = groups_of(None, mesh, WHO)[0] if isinstance(mesh, DeviceMesh) else mesh
    if plan is None:
        if not hasattr(model, "blocks"):
            name = type(model).__name__
            raise TypeError(f"a {name} is not a zoo.Transformer: a plan must say how it is split")
        plan = transformer_plan(model)
    if not isinstance(plan, Mapping):
        raise TypeError(f'a plan names modules, as {{"up": {type(plan).__name__}(...)}}')
    ranks = dist.get_world_size(require_group(group, WHO))
    before = list(model.parameters())
    of_dtensors = mesh if isinstance(mesh, DeviceMesh) else None
    where = Where(group, ranks, device(model).type, sequence_parallel, of_dtensors)
    split_by(model, plan, where)
    abandon_replaced(before, model, SPLIT)
    return model


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The `state_dict` of the dense model, on every rank, as a copy. All ranks must call it.
    Lesson: feature_splitting."""
    state, joined = dict(model.state_dict()), dict[str, torch.Tensor]()
    for prefix, layer in _layers(model):
        for name in layer.state_dict(prefix=prefix):
            del state[name]
        joined |= layer.to_dense().state_dict(prefix=prefix)
    # Joined layers are copies. Were the rest none, a state that is kept would be of two steps.
    copied: dict[str, Any] = tree_map_only(torch.Tensor, lambda own: local_of(own).clone(), state)
    return copied | joined


def load_full_state_dict(model: nn.Module, state: dict[str, Any]) -> None:
    """Load this rank's shards of the `state_dict` of the dense model, in place. Raises
    RuntimeError, as `load_state_dict` does, if the names or shapes are others.
    Lesson: feature_splitting."""
    shards = dict(state)
    for prefix, layer in _layers(model):
        dense = layer.make_dense("meta", None)
        names = [name for name in dense.state_dict() if prefix + name in shards]
        dense.load_state_dict({name: shards.pop(prefix + name) for name in names}, assign=True)
        shards |= {prefix + name: shard for name, _, shard in layer.shards_of(dense)}
    for name, parameter in model.state_dict(keep_vars=True).items():
        if isinstance(parameter, DTensor) and name in shards:
            local = shards[name].to(parameter.dtype)
            shards[name] = DTensor(local, parameter._spec, requires_grad=False)
    model.load_state_dict(shards)


def _layers(model: nn.Module) -> Iterator[tuple[str, ParallelLayer]]:
    """Each layer that is split, and what comes before the names of its parameters in a
    `state_dict`, in each of its places."""
    for place, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, ParallelLayer):
            yield f"{place}." if place else "", layer


def counted_elsewhere(model: nn.Module, group: Group) -> set[nn.Parameter]:
    """The parameters that another rank of the group has too, and counts in norms: of a rank that
    is not the first, what is replicated."""
    if dist.get_rank(group) == 0:
        return set()
    return set(replicated(model).values())


def check_replicas(model: nn.Module, process_group: Group = None) -> None:
    """Make sure that what is replicated is the same on every rank of the group, to the bit: the
    parameters that no layer has cut, and the buffers. Lesson: feature_splitting.

    Before `parallelize_module` it checks the dense model. All ranks must call it. Raises
    RuntimeError, on every rank, that names the parameter and the ranks that differ from the first.
    """
    group = require_group(process_group, "check_replicas")
    named = replicated(model) | dict(model.named_buffers())
    own = {name: _digest(tensor) for name, tensor in named.items()}
    found = gather(group, own)
    for name in dict.fromkeys(name for each in found for name in each):
        first = found[0].get(name)
        other = [
            dist.get_global_rank(group, rank)
            for rank, each in enumerate(found)
            if each.get(name) != first
        ]
        if other:
            raise RuntimeError(
                f"{name} should be the same on every rank: rank {dist.get_global_rank(group, 0)} "
                f"and rank{'s' * (len(other) > 1)} {', '.join(map(str, other))} differ"
            )


def replicated(model: nn.Module) -> dict[str, Any]:
    """The parameters that no layer has cut, by name, each once."""
    cut = {layer._parameters[name] for _, layer in _layers(model) for name in layer.sharded}
    return {name: p for name, p in model.named_parameters() if p not in cut}


def _digest(tensor: torch.Tensor) -> str:
    """Of a DTensor, that of this rank's rows: the ranks of the group have the same rows."""
    data = local_of(tensor).detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest() + f" {tensor.shape} {tensor.dtype}"
