"""Shards as DTensors: then torch's own functions know what a rank's tensors are parts of.

A layer's parameter is a shard. As a plain tensor it looks whole: its norm is one rank's. As a
DTensor it has the dense parameter's shape, and `Shard` or `Replicate` says what of it is here. Then
`torch.nn.utils.clip_grad_norm_`, `nn.init`, averaged models, and checkpoints by
torch.distributed.checkpoint are right as they are.

Layers compute with this rank's plain tensor, and so does what a plan leaves replicated: DTensor's
dispatcher, which finds out at each operation what must be sent, has no part in a pass, but for
torch's PrepareModule styles.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from minidist.common.abandoned import abandon
from minidist.common.dtensor import distributed, relist
from minidist.common.groups import groups_of
from minidist.common.replicas import broadcast_state, require_same_lines, words
from minidist.rank import device
from minidist.tensor_parallel.block import SequenceParallel, shown
from minidist.tensor_parallel.layer import ParallelLayer
from minidist.tensor_parallel.model import SPLIT, WHO, replicated, split
from minidist.tensor_parallel.operators import local

READ = (nn.MultiheadAttention,)  # reads parameters of what is in it


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Any = None,
    *,
    src_data_rank: int | None = 0,
    sequence_parallel: bool = False,
) -> nn.Module:
    """Split a model by features, in place, as torch's function of this name does: its parameters
    become DTensors. Lesson: feature_splitting.

        model = parallelize_module(md.zoo.Transformer())
        loss = md.vocab_parallel_cross_entropy(model(tokens), targets)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)    # the norm of the whole model

        parallelize_module(mine, mesh["tensor"], {
            "layers.*.attention": tensor_parallel.heads("n_heads", "n_kv_heads"),
            "layers.*.attention.[qkv]": "columns", "layers.*.attention.out": "rows",
            "layers.*.mlp.up": ColwiseParallel(), "layers.*.mlp.down": RowwiseParallel(),
            "embedding": "vocabulary", "head": "vocabulary",
        })

    device_mesh: the ranks that share the model, along its one axis. None: all ranks.
    parallelize_plan: of each module what happens to it, by its name; `*` stands for any part of a
        name. None is for a `zoo.Transformer`. There are ready ones: `transformer_plan`,
        `gpt2_plan` and `llama_plan`. A style is one of torch's, such as ColwiseParallel(…), with
        layouts of its own; or

        "columns", "rows"   an nn.Linear becomes a `ColumnParallelLinear`, a `RowParallelLinear`
        qkv(heads)          one for queries, keys and values becomes a `QKVParallelLinear`
        "vocabulary"        an nn.Embedding, or the nn.Linear of the logits, is split by tokens
        heads(name, …)      numbers that the module has as attributes, such as of heads, are divided
                            by that of ranks, so that its `forward` counts this rank's
        "copied"            what is replicated between columns and rows, such as a norm of each
                            head: its gradients are summed over the ranks
        "sequence"          what is replicated elsewhere, such as a norm: "copied", where it sees a
                            part of the tokens on each rank, with `sequence_parallel`
        "scattered"         its output (…, T, C) is cut along T, with `sequence_parallel`

        It may come in parts: first for the model, then for each block. What no plan has named is
        `Replicate`.
    src_data_rank: all ranks take the parameters and buffers of this one (its rank in the mesh), but
        for shards of layers made before; None: they have the same already, and no message is sent.
    sequence_parallel: between the parallel regions, activations are sharded along the sequence; T
        must be a multiple of the number of ranks. A layer there that no plan names gets a gradient
        of this rank's tokens alone, and the ranks drift apart: name it "sequence".

    Every rank sees the same tokens (B, T), and has the logits (B, T, V_r) of its own tokens, if the
    head is split by tokens. One weight in two layers, such as a tied head, stays one. Dropout
    between columns and rows drops the same of each rank's features, and with `sequence_parallel`
    elsewhere the same of each rank's tokens.

    What passes between layers are plain tensors, but for outputs with `use_local_output=False`.
    Replicated parameters are plain while their own module's forward runs; elsewhere they are
    DTensors, and do not mix with plain tensors. A fused layer of queries, keys and values is a
    `_StridedShard`: torch.distributed.checkpoint raises for it, `minidist.saving` takes it.
    `copy.deepcopy` gives a model of the same ranks. `torch.save` of a model that a mesh shares
    raises TypeError: save its `full_state_dict`.

    Returns the module. Make its optimizer afterwards: one that was made before gets a RuntimeError
    for each parameter that is no longer there. Raises ValueError, and changes nothing but for the
    broadcast, if the ranks cannot share its heads or features evenly, or a name of the plan matches
    nothing, and for grouped queries in one layer, which DTensor has no word for; TypeError for a
    layer that a style does not split, or that is sharded already.
    """
    (group,) = groups_of(None, device_mesh, WHO)
    mesh = device_mesh or init_device_mesh(device(module).type, (dist.get_world_size(),))
    if src_data_rank is not None:
        named = [("parameter", *each) for each in replicated(module).items()]
        named += [("buffer", *each) for each in module.named_buffers()]
        plain = [each for each in named if not isinstance(each[2], DTensor)]
        require_same_lines([words(*each) for each in plain], group)
        broadcast_state([tensor for _, _, tensor in plain], group, src_data_rank)
    split(module, mesh, parallelize_plan, sequence_parallel=sequence_parallel)
    distribute(module, mesh)
    return module


def distribute(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make a DTensor of each parameter that is none yet."""
    places = [
        (owner, name, parameter)
        for owner in model.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and not isinstance(parameter, DTensor)
    ]
    made = {p: distributed(p, p.detach(), mesh, *_layout(m, name, p)) for m, name, p in places}
    for owner, name, parameter in places:
        owner._parameters[name] = made[parameter]
    copied = {m for s in model.modules() if isinstance(s, SequenceParallel) for m in s.modules()}
    for owner in dict.fromkeys(owner for owner, *_ in places):
        if not isinstance(owner, ParallelLayer) and owner not in copied:
            owner.register_forward_pre_hook(_show, prepend=True)  # before hooks that read weights
            owner.register_forward_hook(_hide, always_call=True)
    for parameter in made:
        abandon(parameter, SPLIT)


def _layout(owner: nn.Module, name: str, own: nn.Parameter) -> tuple[list[Placement], torch.Size]:
    """How a parameter lies on the ranks, and the shape of the whole."""
    if not isinstance(owner, ParallelLayer):
        return [Replicate()], own.shape
    shape = list(own.shape)
    if name in owner.sharded:
        shape[owner.sharded[name]] = owner.sizes[owner.split]
    return [owner.placement(name)], torch.Size(shape)


def _show(module: Any, _: Any) -> None:
    """Have a module compute with plain tensors."""
    block = shown(module.modules() if isinstance(module, READ) else [module], local)
    block.__enter__()
    if isinstance(module, nn.RNNBase):
        relist(module)
    vars(module).setdefault("_shown", []).append(block)


def _hide(module: Any, *_: Any) -> None:
    if blocks := vars(module).get("_shown"):  # else a hook before ours has raised
        blocks.pop().__exit__(None, None, None)
        if isinstance(module, nn.RNNBase):
            relist(module)
