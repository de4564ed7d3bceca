"""What each rank has of weights and optimizer states, and the whole of it on rank 0 (lesson:
wrong_in_silence).

An entry is `model.<name>` or `optimizer.<state>.<name>`, by the names of the bare model. A piece is
a box in the whole tensor of an entry, by its offsets and sizes. Where it lies the saving of
checkpoints knows, for every strategy; FSDP1 has functions of its own, which give the whole.
"""

import warnings
import zlib
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist.saving.parts import Part, part_of
from minidist.saving.states import MODEL, OPTIMIZER, States

Sizes = tuple[int, ...]
Key = tuple[str, Sizes, Sizes]  # an entry, and a piece of it: offsets, sizes
Pieces = dict[Key, torch.Tensor]
WRAPPERS = {"module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}


def bare_name(name: str) -> str:
    """Without the names of wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def fingerprint(tensor: torch.Tensor) -> int:
    """Four bytes of a tensor's values: equal tensors have the same ones."""
    return zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


class Snapshot:
    """This rank's pieces of weights, buffers and optimizer states, copied. shapes: of the whole
    tensors.

    Of minidist's strategies, torch's DDP, `fully_shard`, FSDP1 and ZeRO. No rank waits for another,
    except with FSDP1, whose ranks must all call this. Raises ValueError if the optimizer has a
    parameter that the model has not, TypeError for an optimizer that has more than states.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.shapes: dict[str, Sizes] = {}
        self.pieces: Pieces = {}
        self.buffers = {bare_name(name) for name, _ in model.named_buffers()}
        self.groups: list[list[str]]  # of the optimizer: names of parameters
        if any(hasattr(module, "_fsdp_wrapped_module") for module in model.modules()):
            entries, groups = _of_fsdp1(model, optimizer)
        else:
            here: Any = optimizer
            if hasattr(optimizer, "consolidate_state_dict"):
                here = _Own(optimizer)
            states = States(model, here)
            entries = states.of_model() | states.of_optimizer()
            groups = [group["names"] for group in states.groups()]
        self.groups = [[bare_name(name) for name in names] for names in groups]
        for name, part in entries.items():
            if isinstance(part, int | float):
                part = part_of(torch.tensor(part))
            if isinstance(part, Part):
                kind, rest = name.split(".", 1)
                entry = f"{kind}.{bare_name(rest)}"
                self.shapes[entry] = tuple(part.shape)
                for at, own in part.pieces.items():
                    self.pieces[entry, tuple(at), tuple(own.shape)] = (
                        own.detach().cpu().clone(memory_format=torch.contiguous_format)
                    )

    def prints(self) -> dict[Key, int]:
        """A few bytes for each piece. Ranks that have the same piece must have the same ones."""
        return {key: fingerprint(piece) for key, piece in self.pieces.items()}


class _Own:
    """Torch's ZeRO, and FairScale's, which have no `state_dict` on a rank: the states here."""

    def __init__(self, optimizer: Any) -> None:
        self.param_groups, self._own = optimizer.param_groups, optimizer.optim.state

    def state_dict(self) -> dict[str, Any]:
        parameters = [p for group in self.param_groups for p in group["params"]]
        states = {i: self._own[p] for i, p in enumerate(parameters) if p in self._own}
        return {"state": states, "param_groups": []}


def _of_fsdp1(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], list[list[str]]]:
    """All of it, on every rank."""
    from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
    from torch.distributed.fsdp import StateDictType

    with warnings.catch_warnings(), TorchFSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        warnings.simplefilter("ignore")  # torch would rather have us use FSDP2
        entries = {MODEL + name: part_of(x) for name, x in model.state_dict().items()}
        own = optimizer.state_dict()
        names = gather(sorted({state for each in own["state"].values() for state in each}))
        # With use_orig_params torch 2.13 gathers all states into one memory: one at a time.
        for state in sorted({name for each in names for name in each}):
            ours = {k: {state: each[state]} for k, each in own["state"].items() if state in each}
            found = TorchFSDP.optim_state_dict(model, optimizer, {**own, "state": ours})["state"]
            entries |= {
                f"{OPTIMIZER}{state}.{name}": part_of(torch.as_tensor(each[state]).clone())
                for name, each in found.items()
            }
        groups = TorchFSDP.optim_state_dict(model, optimizer, {**own, "state": {}})["param_groups"]
    return entries, [group["params"] for group in groups]


def box(offsets: Sizes, sizes: Sizes) -> tuple[slice, ...]:
    """Where a piece lies in the whole."""
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))


def whole(pieces: Pieces) -> dict[str, torch.Tensor]:
    """Whole tensors, by entry, of the pieces of all ranks."""
    shapes: dict[str, Sizes] = {}
    for entry, offsets, sizes in pieces:
        ends = tuple(map(sum, zip(offsets, sizes, strict=True)))
        shapes[entry] = tuple(map(max, ends, shapes.get(entry, ends)))
    found: dict[str, torch.Tensor] = {}
    for (entry, offsets, sizes), piece in pieces.items():
        if sizes == shapes[entry]:
            found[entry] = piece
        else:
            full = found.setdefault(entry, piece.new_zeros(shapes[entry]))
            full[box(offsets, sizes)] = piece
    return found


class Whole:
    """Weights and states of all ranks together, on one: by names of the bare model."""

    def __init__(self, pieces: Pieces) -> None:
        self.weights: dict[str, torch.Tensor] = {}  # and buffers
        self.states: dict[str, dict[str, torch.Tensor]] = {}
        for entry, tensor in whole(pieces).items():
            kind, name = entry.split(".", 1)
            if kind + "." == MODEL:
                self.weights[name] = tensor
            else:
                state, parameter = name.split(".", 1)
                self.states.setdefault(parameter, {})[state] = tensor


def gather(mine: Any) -> list[Any]:
    """What every rank has, on every rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def to_rank_0(
    snapshots: Sequence[Snapshot], prints: Sequence[Mapping[Key, int]], more: Any
) -> tuple[list[Pieces], list[Any]] | None:
    """Of each snapshot all pieces, and `more` of each rank, on rank 0; None elsewhere. All ranks
    call this. The first rank that has a piece sends it, if that is not rank 0. prints: of all
    ranks."""
    rank, here = dist.get_rank(), {key for each in prints[: dist.get_rank()] for key in each}
    mine = [  # rank 0 keeps its own: it need not travel
        _packed({k: v for k, v in each.pieces.items() if rank and k not in here})
        for each in snapshots
    ]
    parts: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object((mine, more), parts, 0)
    if parts is None:
        return None
    made = [dict(each.pieces) for each in snapshots]
    for theirs, _ in parts:
        for pieces, packed in zip(made, theirs, strict=True):
            pieces.update(_unpacked(*packed))
    return made, [each for _, each in parts]


def _packed(pieces: Pieces) -> tuple[dict[Key, torch.dtype], torch.Tensor]:
    """As one tensor: to pickle a thousand takes longer than to send them."""
    flat = [piece.flatten().view(torch.uint8) for piece in pieces.values()]
    kinds = {key: piece.dtype for key, piece in pieces.items()}
    return kinds, torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


def _unpacked(kinds: dict[Key, torch.dtype], flat: torch.Tensor) -> Pieces:
    sizes = [prod(key[2]) * kind.itemsize for key, kind in kinds.items()]
    parts = zip(kinds.items(), flat.split(sizes), strict=True)
    return {key: part.clone().view(kind).view(key[2]) for (key, kind), part in parts}
