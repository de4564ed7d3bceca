"""Whole models: leave each rank its experts, and clip what lies on several ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from minidist.common import agree, norm
from minidist.common.dtensor import distributed
from minidist.common.groups import require_group
from minidist.common.replicas import broadcast_state, require_same_model
from minidist.experts.grouped import Experts
from minidist.experts.moe import MoE
from minidist.rank import device


def parallelize(model: nn.Module, device_mesh: DeviceMesh | None = None) -> nn.Module:
    """Cut the experts of each `MoE` in a model over ranks, in place, and return the model.

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "experts"))
        md.experts.parallelize(model, mesh)
        model = md.DistributedDataParallel(model)       # what all ranks have; or torch's
        loss.backward()
        md.experts.clip_grad_norm_(model, 1.0)
        optimizer.step()
        md.experts.update_bias(model, 0.001)            # if it is DeepSeek-V3's

    All ranks of the mesh share a batch: each has other rows. Along its axis "experts" they have
    other experts, and along the other axes the same ones. None: all ranks have other experts. With
    one rank along "experts", each rank has all of them, but balances those of all ranks' rows.

    All ranks take the first one's parameters and buffers. Experts become DTensors, which
    checkpoints take as they are. Both DDPs leave them alone, and `fully_shard` does with
    `ignored_params=set(md.experts.parameters(model))`. After backward the gradient of an expert is
    that of the mean of all ranks' losses.

    Limits: an optimizer that was made before does not train experts; `md.watch` finds this. Load
    one process's weights before. Experts are not sharded along the other axes, and their gradients
    travel in each backward pass, also in `no_sync`. ZeRO's optimizers take no DTensors. Where
    torch's optimizers take many tensors at once, on GPUs, they do not mix DTensors and plain ones:
    give `parameters(model)` a group of their own, and with a gradient scaler an optimizer.

    Raises RuntimeError without a process group; ValueError, on every rank, if the ranks have
    different models, or an expert would be on no rank.
    """
    world = require_group(None, "experts.parallelize")
    mesh = device_mesh or init_device_mesh(
        device(model).type, (world.size(),), mesh_dim_names=("experts",)
    )
    names = mesh.mesh_dim_names or ()
    layers = [each for each in model.modules() if isinstance(each, MoE)]
    if "experts" not in names or not layers:
        raise ValueError(
            f"it takes a model with a MoE, and a mesh with an axis experts, not {names}"
        )
    own, group = mesh["experts"], mesh._flatten().get_group()
    others = tuple(name for name in names if name != "experts" and mesh[name].size() > 1)
    replicas = mesh[others]._flatten().get_group() if others else None
    agree.require_same(group, {"a layer of experts": [each.extra_repr() for each in layers]})
    require_same_model(model, group)
    broadcast_state([*model.parameters(), *model.buffers()], group)
    for layer in layers:
        if len(layer.counts) % own.size():
            raise ValueError(
                f"{len(layer.counts)} experts cannot be shared by {own.size()} ranks: each is to "
                "have as many"
            )
        layer.group, layer.router.batch_group = own.get_group(), group
        layer.experts.divisor, layer.experts.replicas = group.size(), replicas
        for name, whole in list(layer.experts.named_parameters()):
            rows = whole.detach().chunk(own.size())[own.get_local_rank()].clone()
            cut = distributed(whole, rows, own, [Shard(0)], whole.shape)
            setattr(layer.experts, name, cut)
    left = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    TorchDDP._set_params_and_buffers_to_ignore_for_model(model, left)
    return model


def parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those of the experts: for a group of their own in an optimizer, or for `fully_shard` to
    leave alone."""
    return [p for m in model.modules() if isinstance(m, Experts) for p in m.parameters()]


def counted_elsewhere(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that another rank of a batch has too, and counts in norms."""
    layer = next(each for each in model.modules() if isinstance(each, MoE))
    experts, group, replicas = (
        set(parameters(model)),
        layer.router.batch_group,
        layer.experts.replicas,
    )

    def another_counts(parameter: Any) -> bool:
        if parameter in experts:
            return replicas is not None and dist.get_rank(replicas) > 0
        if isinstance(parameter, DTensor):  # rows; of hybrid sharding, one replica's
            mesh: Any = parameter.device_mesh
            here = zip(parameter.placements, mesh.get_coordinate(), strict=True)
            return any(place > 0 for placement, place in here if placement.is_replicate())
        return group is not None and dist.get_rank(group) > 0

    return {p for p in model.parameters() if another_counts(p)}


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale the gradients so that their norm, that of the whole model, is at most `max_norm`, and
    return what it was, the same number on every rank. Every rank calls this.

    An expert counts once, and so does what all ranks have, or `fully_shard` has sharded over them.
    """
    group = next(each.router.batch_group for each in model.modules() if isinstance(each, MoE))
    options: Any = dict(groups=[] if group is None else [group], device=device(model))
    options |= dict(elsewhere=counted_elsewhere(model))
    return norm.clip_grad_norm_(model.parameters(), max_norm, norm_type, **options)
