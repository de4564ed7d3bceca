"""A whole model that is split by features: cut it, check it, join it.

A layer's parameter is a shard. As a plain tensor it looks whole: its norm is one rank's. As a
DTensor it has the dense parameter's shape, and `Shard` or `Replicate` says what of it is here. Then
`torch.nn.utils.clip_grad_norm_`, `nn.init`, averaged models, and checkpoints by
torch.distributed.checkpoint are right as they are. So `parallelize_module` makes DTensors; and what
takes plain tensors only, as other strategies do, begins with `split`.

Modules compute with this rank's plain tensor in any case: DTensor's dispatcher, which finds out at
each operation what must be sent, has no part in a pass.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from minidist.common.agree import gather
from minidist.common.dtensor import distributed
from minidist.common.groups import groups_of, require_group
from minidist.common.replicas import broadcast_state, require_same_lines, words
from minidist.common.tensors_in import local_of
from minidist.rank import device
from minidist.tensor_parallel.layers import ParallelLayer, local
from minidist.tensor_parallel.operators import Group
from minidist.tensor_parallel.plan import Where, compute_with, split_by, transformer_plan

WHO = "parallelize_module"


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Mapping[str, Any] | None = None,
    *,
    sequence_parallel: bool = False,
) -> nn.Module:
    """Split a model by features, in place, and return it: its parameters become DTensors. Torch's
    function of this name does the same for torch's styles. Lesson: feature_splitting.

        model = parallelize_module(md.zoo.Transformer())
        loss = md.vocab_parallel_cross_entropy(model(tokens), targets)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)    # the norm of the whole model

    device_mesh: the ranks that share the model, along its one axis. None: all ranks.
    parallelize_plan: what happens to each part of the model, see `tensor_parallel.plan`. None is
        for a `zoo.Transformer`. It may come in parts: first for the model, then for each block.
    sequence_parallel: between the parallel regions, activations are sharded along the sequence; T
        must be a multiple of the number of ranks. A layer there that no plan names gets a gradient
        of this rank's tokens alone, and the ranks drift apart: name it "sequence". The plan, or who
        calls the model, cuts the tokens.

    All ranks take the parameters and buffers of the mesh's first one. Every rank sees the same
    tokens (B, T), and has the logits (B, T, V_r) of its own tokens, if the head is split by tokens.
    (`F.cross_entropy` of these is wrong without an error.) One weight in two layers, such as a tied
    head, stays one. What passes between layers are plain tensors.

    Limits: an nn.MultiheadAttention reads a weight of a part that it does not call: take `split`.
    Dropout between columns and rows drops the same of each rank's features, and with
    `sequence_parallel` elsewhere the same of each rank's tokens; `fork_rng` draws others.
    Replicated parameters are plain while their own module's forward runs; elsewhere they are
    DTensors, and do not mix with plain tensors. A fused layer of queries, keys and values is a
    `_StridedShard`: torch.distributed.checkpoint raises for it, `minidist.saving` takes it.
    `copy.deepcopy` gives a model of the same ranks. An optimizer that was made before trains
    nothing; `md.watch` finds this.

    Raises ValueError, and changes nothing but for the broadcast, if the
    ranks cannot share its heads or features evenly, or a name of the plan matches nothing, and for
    grouped queries in one layer, which DTensor has no word for; TypeError for a layer that a style
    does not split, or that is sharded already.
    """
    (group,) = groups_of(None, device_mesh, WHO)
    mesh = device_mesh or init_device_mesh(device(module).type, (dist.get_world_size(),))
    named = [("parameter", *each) for each in replicated(module).items()]
    named += [("buffer", *each) for each in module.named_buffers()]
    plain = [each for each in named if not isinstance(each[2], DTensor)]
    require_same_lines([words(*each) for each in plain], group)
    broadcast_state([tensor for _, _, tensor in plain], group)
    _split(module, parallelize_plan, Where(group, sequence_parallel, as_dtensors=True))
    _distribute(module, mesh)
    return module


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

    mesh: of one axis; or a group, and None is the default one. A plan may also have grouped queries
        in one layer.
    """
    group = groups_of(None, mesh, WHO)[0] if isinstance(mesh, DeviceMesh) else mesh
    require_group(group, WHO)
    _split(model, plan, Where(group, sequence_parallel, as_dtensors=False))
    return model


def _split(model: Any, plan: Mapping[str, Any] | None, where: Where) -> None:
    if plan is None:
        if not hasattr(model, "blocks"):
            name = type(model).__name__
            raise TypeError(f"a {name} is not a zoo.Transformer: a plan must say how it is split")
        plan = transformer_plan(model)
    split_by(model, plan, where)


def _distribute(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make a DTensor of each parameter that is none yet."""
    places = [
        (owner, name, parameter)
        for owner in model.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and not isinstance(parameter, DTensor)
    ]
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner, name, own in places:
        layer = owner if isinstance(owner, ParallelLayer) else None
        placement = layer.placement(name) if layer else Replicate()
        shape = layer.whole_shape(name) if layer else own.shape
        made[own] = distributed(own, own.detach(), mesh, [placement], shape)
    for owner, name, own in places:
        owner._parameters[name] = made[own]
    for owner in dict.fromkeys(owner for owner, *_ in places):
        if not isinstance(owner, ParallelLayer):
            compute_with(owner, local)


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The `state_dict` of the dense model, on every rank, as a copy. All ranks must call it.
    Lesson: feature_splitting."""
    state: dict[str, Any] = dict(model.state_dict())
    cut = {name: (layer, key) for name, layer, key in _sharded(model)}
    for name, value in state.items():
        if name in cut:
            layer, key = cut[name]
            state[name] = layer.joined(key)
        elif isinstance(value, torch.Tensor):  # a DTensor may be of experts, in parts
            state[name] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    return state


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load this rank's shards of the `state_dict` of the dense model, in place. Raises
    RuntimeError, as `load_state_dict` does, if the names or shapes are others.
    Lesson: feature_splitting."""
    cut = {name: (layer, key) for name, layer, key in _sharded(model)}
    shards = dict(state)
    for name, own in model.state_dict(keep_vars=True).items():
        if name in cut and name in shards:
            layer, key = cut[name]
            wanted, found = layer.whole_shape(key), shards[name].shape
            if found != wanted:
                raise RuntimeError(f"size mismatch for {name}: {tuple(found)}, not {tuple(wanted)}")
            shards[name] = layer.shard_of(key, shards[name])
        if isinstance(own, DTensor) and name in shards:
            here, where = shards[name].to(own.dtype), (own.device_mesh, own.placements)
            shards[name] = (
                distribute_tensor(here, *where, src_data_rank=None)
                if here.shape == own.shape
                else DTensor(here, own._spec, requires_grad=False)
            )
    model.load_state_dict(shards)


def _sharded(model: nn.Module) -> Iterator[tuple[str, ParallelLayer, str]]:
    """Of each parameter that is cut: its name in a `state_dict`, in each of its places; its layer;
    and its name there."""
    for place, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, ParallelLayer):
            for name in layer.sharded:
                if layer._parameters[name] is not None:
                    yield f"{place}.{name}" if place else name, layer, name


def replicated(model: nn.Module) -> dict[str, Any]:
    """The parameters that no layer has cut, by name, each once."""
    cut = {layer._parameters[name] for _, layer, name in _sharded(model)}
    return {name: p for name, p in model.named_parameters() if p not in cut}


def counted_elsewhere(model: nn.Module, group: Group) -> set[nn.Parameter]:
    """The parameters that another rank of the group has too, and counts in norms: of a rank that
    is not the first, what is replicated."""
    return set() if dist.get_rank(group) == 0 else set(replicated(model).values())


def check_replicas(model: nn.Module, process_group: Group = None) -> None:
    """Make sure that what is replicated is the same on every rank of the group, to the bit: the
    parameters that no layer has cut, and the buffers. Lesson: feature_splitting.

    Before `parallelize_module` it checks the dense model. All ranks must call it. Raises
    RuntimeError, on every rank, that names the parameter and the ranks that differ from the first.
    """
    group = require_group(process_group, "check_replicas")
    named = replicated(model) | dict(model.named_buffers())
    found = gather(group, {name: _digest(tensor) for name, tensor in named.items()})
    for name in dict.fromkeys(name for each in found for name in each):
        first, *other = [
            dist.get_global_rank(group, rank)
            for rank, each in enumerate(found)
            if rank == 0 or each.get(name) != found[0].get(name)
        ]
        if other:
            raise RuntimeError(
                f"{name} should be the same on every rank: rank {first} "
                f"and rank{'s' * (len(other) > 1)} {', '.join(map(str, other))} differ"
            )


def _digest(tensor: torch.Tensor) -> str:
    """Of a DTensor, that of this rank's rows: the ranks of the group have the same rows."""
    data = local_of(tensor).detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest() + f" {tensor.shape} {tensor.dtype}"
