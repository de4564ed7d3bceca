"""A whole model that is split by features: cut it, clip it, check it, join it."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from minidist.common import norm
from minidist.common.abandoned import abandon_replaced
from minidist.common.groups import require_group
from minidist.common.replicas import require_plain
from minidist.common.tensors_in import local_of
from minidist.tensor_parallel.layer import ParallelLayer
from minidist.tensor_parallel.operators import Group
from minidist.tensor_parallel.plan import split_by
from minidist.tensor_parallel.ready_plans import transformer_plan
from minidist.tensor_parallel.styles import Where

SPLIT = (
    "the model has been split by features, and this rank has a shard in its place. Make the "
    "optimizer after parallelize or MixedParallel, of the model's parameters()"
)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | Group = None,
    plan: Mapping[str, Any] | None = None,
    *,
    sequence_parallel: bool = False,
) -> nn.Module:
    """Split a model by features, in place. Lesson: feature_splitting.

        model = parallelize(md.zoo.Transformer())       # the same model on every rank
        loss = md.vocab_parallel_cross_entropy(model(tokens), targets)

        parallelize(mine, mesh["tensor"], {
            "layers.*.attention": tensor_parallel.heads("n_heads", "n_kv_heads"),
            "layers.*.attention.[qkv]": "columns", "layers.*.attention.out": "rows",
            "layers.*.mlp.up": "columns", "layers.*.mlp.down": "rows",
            "embedding": "vocabulary", "head": "vocabulary",
        })

    mesh: the ranks that share the model: a mesh of one axis, or a group; None is the default group.
    plan: of each module what happens to it, by its name; `*` stands for any part of a name. None
        is for a `zoo.Transformer`. There are ready ones: `transformer_plan`, `gpt2_plan` and
        `llama_plan`. A style is

        "columns", "rows"   an nn.Linear becomes a `ColumnParallelLinear`, a `RowParallelLinear`
        qkv(heads, …)       one for queries, keys and values becomes a `QKVParallelLinear`
        "vocabulary"        an nn.Embedding, or the nn.Linear of the logits, is split by tokens
        heads(name, …)      numbers that the module has as attributes, such as of heads, are divided
                            by that of ranks, so that its `forward` counts this rank's
        "copied"            what is replicated between columns and rows, such as a norm of each
                            head: its gradients are summed over the ranks
        "sequence"          what is replicated elsewhere, such as a norm: "copied", where it sees a
                            part of the tokens on each rank, with `sequence_parallel`
        "scattered"         its outputs (…, T, C) are cut along T, with `sequence_parallel`

        or one of torch's, such as ColwiseParallel(…); those take layouts of their own, whatever
        `sequence_parallel` says.
    sequence_parallel: between the parallel regions, activations are sharded along the sequence; T
        must be a multiple of the number of ranks.

    Every rank sees the same tokens (B, T), and has the logits (B, T, V_r) of its own tokens, if the
    head is split by tokens. One weight in two layers, such as a tied head, stays one. What no style
    names is replicated. Dropout between columns and rows drops the same of each rank's features.

    `copy.deepcopy` gives a model of the same ranks, each with a copy of its shards. `torch.save` of
    a model that a mesh or a group shares raises TypeError: save its `full_state_dict`.

    A parameter is a plain tensor then, this rank's shard, which torch's clipping, `nn.init` and
    checkpoints take for a whole one. They are right for a model of `parallelize_module`.

    Returns the model. Make its optimizer afterwards: an optimizer that was made before gets a
    RuntimeError for each parameter that is no longer there. Raises ValueError, and changes nothing,
    if the ranks cannot share its heads or features evenly, or a name of the plan matches nothing;
    TypeError for a layer that a style does not split, and for DTensors.
    """
    for name, parameter in model.named_parameters():
        require_plain(f"parameter {name}", parameter)
    split(model, mesh, plan, sequence_parallel)
    return model


def split(
    model: nn.Module,
    mesh: DeviceMesh | Group,
    plan: Mapping[str, Any] | None,
    sequence_parallel: bool,
    dtensors: bool = False,
) -> None:
    """Put layers that hold this rank's shards in the places that the plan names. dtensors: refuse
    those that cannot be DTensors."""
    group = group_of(mesh)
    if plan is None:
        if not hasattr(model, "blocks"):
            name = type(model).__name__
            raise TypeError(f"a {name} is not a zoo.Transformer: a plan must say how it is split")
        plan = transformer_plan(model)
    if not isinstance(plan, Mapping):
        raise TypeError(f'a plan names modules, as {{"up": {type(plan).__name__}(...)}}')
    ranks = dist.get_world_size(require_group(group, "parallelize"))
    before = [p for p in model.parameters() if not isinstance(p, DTensor)]
    of_dtensors = mesh if dtensors and isinstance(mesh, DeviceMesh) else None
    split_by(model, plan, Where(group, ranks, sequence_parallel, of_dtensors))
    abandon_replaced(before, model, SPLIT)


def group_of(mesh: DeviceMesh | Group) -> Group:
    """The group of a mesh of one axis. Raises ValueError for one of several."""
    if not isinstance(mesh, DeviceMesh):
        return mesh
    if mesh.ndim != 1:
        names = ", ".join(mesh.mesh_dim_names or ())
        raise ValueError(f'a model is split along one axis, as mesh["tensor"], not along {names}')
    return mesh.get_group()


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The `state_dict` of the dense model, on every rank. All ranks must call it.
    Lesson: feature_splitting."""
    state = model.state_dict()
    for place, layer in model.named_modules():
        if isinstance(layer, ParallelLayer):
            prefix = f"{place}." if place else ""
            for name in layer.state_dict(prefix=prefix):
                del state[name]
            for name, tensor in layer.to_dense().state_dict().items():
                state[prefix + name] = tensor
    return {name: local_of(value) for name, value in state.items()}


def load_full_state_dict(model: nn.Module, state: dict[str, Any]) -> None:
    """Load this rank's shards of the `state_dict` of the dense model, in place. Raises
    RuntimeError, as `load_state_dict` does, if the names or shapes are others.
    Lesson: feature_splitting."""
    shards = dict(state)
    for place, layer in model.named_modules():
        if isinstance(layer, ParallelLayer):
            prefix, own = f"{place}." if place else "", dict(layer.named_parameters())
            dense = layer.make_dense("meta", next(iter(own.values())).dtype)
            names = [name for name in dense.state_dict() if prefix + name in shards]
            dense.load_state_dict({name: shards.pop(prefix + name) for name in names}, assign=True)
            layer.take(dense)
            shards |= layer.state_dict(prefix=prefix)
            for name, parameter in own.items():
                setattr(layer, name, parameter)  # an optimizer and a tied layer know this one
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, DTensor) and name in shards:
            spec = parameter._spec
            shards[name] = DTensor(shards[name].to(parameter.dtype), spec, requires_grad=False)
    model.load_state_dict(shards)


def grad_norm(model: nn.Module, norm_type: float = 2.0) -> torch.Tensor:
    """The norm of the gradients of the dense model, as `torch.nn.utils.get_total_norm` has it: a
    number, the same on every rank. Lesson: feature_splitting.

    A sharded parameter counts with the shards of all ranks, a replicated one once. One all_reduce
    of one number; all ranks must call it.
    """
    layers = {layer for _, _, layer in _parameters(model) if layer is not None}
    groups = {layer.process_group or dist.group.WORLD for layer in layers}
    if len(groups) > 1:
        raise ValueError("a model has one norm if all of its layers are split over one group")
    elsewhere = {p for group in groups for p in counted_elsewhere(model, group)}
    own = list(model.parameters())
    first = own[0] if own else torch.zeros(())
    total = norm.grad_norm(own, norm_type, groups=groups, device=first.device, elsewhere=elsewhere)
    return total.to(first.dtype)


def counted_elsewhere(model: nn.Module, group: Group) -> set[nn.Parameter]:
    """The parameters that another rank of the group has too, and counts in norms: of a rank that
    is not the first, what is replicated."""
    if dist.get_rank(group) == 0:
        return set()
    return {parameter for _, parameter, layer in _parameters(model) if layer is None}


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale the gradients so that their norm, that of the dense model, is at most `max_norm`.
    Returns what the norm was. Lesson: feature_splitting.

    `torch.nn.utils.clip_grad_norm_` would clip each rank by the norm of its own shards, and let the
    replicated parameters part.
    """
    total = grad_norm(model, norm_type)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, total)
    return total


def check_replicas(model: nn.Module, process_group: Group = None) -> None:
    """Make sure that what is replicated is the same on every rank of the group, to the bit: the
    parameters that no layer has cut, and the buffers. Lesson: feature_splitting.

    Before `parallelize` it checks the dense model. All ranks must call it. Raises RuntimeError, on
    every rank, that names the parameter and the ranks that differ from the first.
    """
    group = require_group(process_group, "check_replicas")
    named = {name: tensor for name, tensor, layer in _parameters(model) if layer is None}
    own = {name: _digest(tensor) for name, tensor in (named | dict(model.named_buffers())).items()}
    found: list[dict[str, str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    for name in dict.fromkeys(name for each in found for name in each):
        digests = [each.get(name) for each in found]
        other = [
            dist.get_global_rank(group, rank)
            for rank, digest in enumerate(digests)
            if digest != digests[0]
        ]
        if other:
            raise RuntimeError(
                f"{name} should be the same on every rank: rank {dist.get_global_rank(group, 0)} "
                f"and rank{'s' * (len(other) > 1)} {', '.join(map(str, other))} differ"
            )


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParallelLayer | None]]:
    """Each parameter once, and the layer that has cut it, if one has."""
    seen = set()
    for place, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                is_cut = isinstance(module, ParallelLayer) and name in module.sharded
                yield f"{place}.{name}".lstrip("."), parameter, module if is_cut else None


def _digest(tensor: torch.Tensor) -> str:
    """Of a DTensor, that of this rank's rows: the ranks of the group have the same rows."""
    data = local_of(tensor).detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest() + f" {tensor.shape} {tensor.dtype}"
