"""A training step of one rank of many, without the others: its bytes, its messages, in their order.

Our FullyShardedDataParallel and MixedParallel run as they are. Ranks of later pipeline stages
cannot: they learn from the first one what will come to them. Lesson: scaling_out
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from minidist.fully_sharded import FullyShardedDataParallel, by_class
from minidist.instruments.measure import MemoryTracker
from minidist.instruments.measure.storages import Ledger
from minidist.instruments.planner.layout import Layout, stages
from minidist.instruments.planner.model_states import require_one_of
from minidist.instruments.planner.transformer import Transformer
from minidist.instruments.scaling.llama_shape import Llama, LlamaHead, LlamaLayer, plan_of
from minidist.instruments.scaling.one_rank import Trace, one_rank_of
from minidist.mixed import MixedParallel, mesh
from minidist.tensor_parallel import VocabParallelEmbedding

UNITS = by_class(LlamaLayer, nn.Embedding, VocabParallelEmbedding, LlamaHead)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "autocast": torch.float32}


@dataclass
class Rehearsed:
    """What a rank did in a step. memory: {category: bytes}, as `md.measure.MemoryTracker` counts
    them, at the end of the step, with its gradients; of activations the most that lived at once.
    peak: the most bytes in all."""

    trace: Trace
    memory: dict[str, int]
    peak: int

    @property
    def sent(self) -> dict[tuple[str, int], int]:
        """{(operation, ranks of the group): bytes}."""
        counts: Counter[tuple[str, int]] = Counter()
        for operation, nbytes, group in self.trace.messages:
            counts[operation, len(group)] += nbytes
        return dict(counts)


def rehearse(shape: Transformer, layout: Layout, precision: str = "autocast") -> Rehearsed:
    """A step of rank 0, with Adam, in this process, in seconds. It is the second step, as all later
    ones are. ZeRO-3 along data alone is FullyShardedDataParallel, all else MixedParallel.
    Lesson: scaling_out.

        layout = md.planner.Layout(world_size=1024, stage=3)
        rehearse(md.planner.MODELS["llama-3-8b"], layout).memory["parameters"]   # 31 MB

    shape: of a Llama. precision: "float32", "bfloat16", or with stage 3 "autocast", of
        `planner.PRECISIONS`.

    Raises ValueError for another layout: stage 1 or 2, recomputation, chunks, stored attention.
    """
    require_one_of("stage", layout.stage, (0, 3))
    dtypes = DTYPES if layout.stage == 3 else ("float32", "bfloat16")
    require_one_of("precision", precision, dtypes)
    if (layout.recompute, layout.chunks, layout.stored_attention) != ("nothing", 1, False):
        raise ValueError("a rehearsal recomputes nothing, and has one chunk a rank, no scores")
    with one_rank_of(layout.world_size) as trace:
        model, step = _build(shape, layout, precision)
        optimizer = torch.optim.Adam(model.parameters())
        step()
        optimizer.step()
        optimizer.zero_grad()
        trace.clear()
        with _OnMeta(model, optimizer) as memory:
            step()
            optimizer.step()
    held = memory.live | {"activations": memory.peak_of["activations"]}
    kinds = "parameters", "gradients", "optimizer states", "activations"
    return Rehearsed(trace, {kind: held[kind] for kind in kinds}, memory.peak)


def _build(shape: Transformer, layout: Layout, precision: str) -> tuple[Any, Any]:
    """The wrapped model, and a function that goes forward and backward."""
    model: Any = Llama(shape).to(DTYPES[precision])
    dtype = torch.bfloat16 if precision == "autocast" else None
    shard = partial(
        FullyShardedDataParallel,
        auto_wrap_policy=UNITS,
        mixed_precision=MixedPrecision(dtype, dtype and torch.float32),  # as torchtitan has it
    )
    b, m = layout.micro_batch, layout.micro_batches
    if layout.stage == 3 and layout.data == layout.world_size:
        model = shard(model)
        tokens = torch.empty(b, shape.length, dtype=torch.long, device="meta")

        def train() -> None:
            for _ in range(m):
                logits = model(tokens).flatten(0, 1).float()
                F.cross_entropy(logits, tokens.flatten()).backward()

        return model, train
    mixed = MixedParallel(
        model,
        mesh(layout.data, layout.pipeline, layout.tensor),
        m,
        balance=_balance(shape, layout),
        plan=plan_of(shape),
        shard=shard if layout.stage == 3 else None,
        sequence_parallel=layout.sequence_parallel,
    )
    batch = torch.empty(b * m, shape.length, dtype=torch.long, device="meta")
    return mixed, partial(mixed.train_step, batch, batch, mixed.cross_entropy)


def _balance(shape: Transformer, layout: Layout) -> list[int]:
    """The planner's: with the embedding before, norm and head behind."""
    return [stage.layers + stage.first + 2 * stage.last for stage in stages(shape, layout)]


class _OnMeta(MemoryTracker):
    """Bytes that tensors would have."""

    def _make_ledger(self, device: torch.device) -> Ledger:
        return Ledger(torch.device("meta"))
