"""A whole model on tokens that are cut over ranks.

Tokens meet in attention alone; the rest of a model acts on each token by itself. So three things
are left to get right, and public programs have got each of them wrong: a token's position is that
in its document, not on its rank; a target is the next token of the whole sequence; and the loss is
a sum over the tokens of all ranks, divided once by how many they are.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import isclose
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from minidist.common import agree
from minidist.common.groups import message_device, require_group
from minidist.common.wrapper import Wrapper, copy_sharing
from minidist.context_parallel.cuts import Cut
from minidist.context_parallel.gathered import gathered_attention
from minidist.context_parallel.kernel import at_least_float32
from minidist.context_parallel.ring import ring_attention
from minidist.context_parallel.ulysses import ulysses_attention
from minidist.distributed_data_parallel import DistributedDataParallel

Attention = Callable[..., torch.Tensor]
ATTENTION: dict[str, Attention] = {
    "ring": ring_attention,
    "gathered": gathered_attention,
    "ulysses": ulysses_attention,
}


class ContextParallel(Wrapper):
    """Trains `module`, a causal language model, on sequences whose tokens are cut over the ranks of
    a group. Lesson: long_sequences.

        model = md.ContextParallel(md.zoo.Decoder())
        loss = model(tokens, targets)               # whole rows, the same on all ranks
        loss.backward()                             # gradients as one process would have them
        optimizer.step()

    Its `forward(tokens, positions)` takes this rank's tokens (B, T_r) and their positions in their
    documents (T_r,), and returns logits (B, T_r, V) alone: the loss is computed here. While it
    runs, also again in backward, its calls of `F.scaled_dot_product_attention` attend to the tokens
    of all ranks.

    To the weights a rank with other tokens is what one with other rows is: data parallelism adds up
    the gradients. A bare module is wrapped in our DistributedDataParallel over the group. One that
    is wrapped already, or sharded, stays so; its ranks are then all those of data and context:

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
        group = mesh.get_group("context")
        model = md.ContextParallel(md.DistributedDataParallel(model), process_group=group)

    attention: "ring"; "gathered"; or "ulysses", which needs heads that all ranks can share.
    process_group: the ranks that share a sequence; None is the default group.

    After a forward pass `model.cut` is a `Cut`, a zigzag: which tokens each rank had.

    Raises RuntimeError without a process group; ValueError, on every rank, for another name, and if
    gradients are not averaged over all ranks of the group; NotImplementedError for dropout.
    `forward` raises ValueError, on every rank, if the ranks have other batches, targets another
    shape than tokens, or tokens are fewer than ranks; NotImplementedError for attention that is not
    causal, has a mask, a dropout, or a scale of its own.

    Limits: documents are cut alike in all rows. Each replica's mean counts alike, however many
    targets it has. No window of attention; q, k and v have four dimensions. Attention that a model
    computes itself is not seen, nor the fast path of nn.TransformerEncoder in evaluation: a model
    that never calls torch's function raises RuntimeError. `F.dropout` is not seen. What a mask
    leaves is found from all pairs of two ranks' tokens, a byte each. On GPUs a block's scores are
    stored while it is computed. Of 16-bit keys the gradients are rounded at each hop.
    """

    cut: Cut

    def __init__(
        self,
        module: nn.Module,
        attention: str = "ring",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        group = require_group(process_group, "ContextParallel")
        agree.require_same(group, dict(attention=attention))
        if attention not in ATTENTION:
            raise ValueError(f"attention must be one of {', '.join(ATTENTION)}, not {attention!r}")
        if any(isinstance(m, nn.Dropout) and m.p > 0 for m in module.modules()):
            raise NotImplementedError(
                "ContextParallel: no dropout, its masks would depend on the ranks"
            )
        averaging, own = _averaging_ranks(module), dist.get_process_group_ranks(group)
        if averaging is None:
            module = DistributedDataParallel(module, process_group=group)
        elif not averaging >= set(own):
            raise ValueError(
                f"ranks {own} share a sequence, but gradients are averaged over {sorted(averaging)}"
                ": data parallelism takes all ranks of data and context"
            )
        super().__init__(module)
        self.process_group, self._attention = group, ATTENTION[attention]

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The mean loss over all tokens that have a target, on every rank; without targets, this
        rank's logits (B, T_r, V), of the tokens that `self.cut` names.

        tokens, targets: (B, T), the whole rows. A target is the token after its own; -100 is none.
        documents: (T,), a number for each token: no token sees another document. None is one.
        """
        group, rank = self.process_group, dist.get_rank(self.process_group)
        _require_same_batch(group, dict(tokens=tokens, targets=targets, documents=documents))
        if targets is not None and targets.shape != tokens.shape:
            raise ValueError(f"tokens are {tuple(tokens.shape)}, targets {tuple(targets.shape)}")
        if tokens.shape[1] < group.size():
            raise ValueError(f"{tokens.shape[1]} tokens cannot be cut over {group.size()} ranks")
        self.cut = cut = Cut.of("zigzag", tokens.shape[1], group.size(), documents)
        positions = cut.in_document(rank).to(tokens.device)
        attend = partial(self._attention, cut=cut, group=group)
        with attention_by(attend) as calls:
            logits: torch.Tensor = self.module(cut.take(tokens, rank), positions=positions)
        if not calls:
            raise RuntimeError(
                "the module never called F.scaled_dot_product_attention: each token has seen "
                "those of its own rank only"
            )
        logits = _AttendingAgain.apply(logits, attend)
        if targets is None:
            return logits
        logits = logits.flatten(0, -2).to(at_least_float32(logits))
        loss = F.cross_entropy(logits, cut.take(targets, rank).flatten(), reduction="sum")
        count, total = (targets != -100).sum(), loss.detach().clone()
        dist.all_reduce(total, group=group)
        # The gradient: this rank's part, times the ranks, by which data parallelism divides.
        return total / count + (loss - loss.detach()) * group.size() / count

    def __deepcopy__(self, memo: dict[int, Any]) -> "ContextParallel":
        return copy_sharing(self, memo, self.process_group)


class _AttendingAgain(torch.autograd.Function):
    """Nothing forward. Backward begins here, and checkpoints in it compute layers again: until it
    has ended, or failed, they attend as in this forward pass."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, attend: Attention) -> torch.Tensor:
        ctx.attend = attend
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # If backward fails, torch drops the callback, and the block ends with it.
        again = ExitStack()
        again.enter_context(attention_by(ctx.attend))
        torch.autograd.Variable._execution_engine.queue_callback(again.close)
        return gradient, None


@contextmanager
def attention_by(attend: Attention) -> Iterator[list[Any]]:
    """Within the block `F.scaled_dot_product_attention` is attend(q, k, v): causal, and nothing
    else. Gives a list that grows by each call's shape of q."""
    before, calls = F.scaled_dot_product_attention, list[Any]()
    before = getattr(before, "before", before)  # of two such blocks, the last one counts

    def replaced(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        usual = scale is None or isclose(scale, query.shape[-1] ** -0.5)
        asked = {"a mask": attn_mask is not None, "dropout": dropout_p > 0}
        asked |= {"a scale of its own": not usual, "no causality": not is_causal}
        if unknown := [name for name, here in asked.items() if here]:
            raise NotImplementedError(f"attention over cut tokens with {' and '.join(unknown)}")
        calls.append(query.shape)
        return attend(query, key, value)

    F.scaled_dot_product_attention, replaced.before = replaced, before  # type: ignore[attr-defined]
    try:
        yield calls
    finally:
        F.scaled_dot_product_attention = before


def _averaging_ranks(module: nn.Module) -> set[int] | None:
    """Those over which gradients are averaged; None for a bare module."""
    inner = getattr(module, "module", module)
    left_out = getattr(inner, "_ddp_params_and_buffers_to_ignore", ())  # such as experts
    for name, parameter in inner.named_parameters():
        if isinstance(parameter, DTensor) and name not in left_out:  # along all axes of a mesh
            return set(parameter.device_mesh.mesh.flatten().tolist())
    group = getattr(module, "process_group", None)
    return group and set(dist.get_process_group_ranks(group))


def _require_same_batch(group: dist.ProcessGroup, batch: dict[str, torch.Tensor | None]) -> None:
    """Raises ValueError, on every rank, unless all ranks were given the same whole batch. By the
    largest and the smallest of the ranks' digests."""
    digests = []
    for x in batch.values():
        x = torch.zeros(0) if x is None else x
        weighed = x.flatten() * torch.arange(1, x.numel() + 1, device=x.device)
        digests += [int(weighed.sum()) % 2**40 * 1009 + x.numel()]
    ends = torch.tensor([digests, [-each for each in digests]], device=message_device(group))
    dist.all_reduce(ends, dist.ReduceOp.MAX, group)
    for name, differs in zip(batch, ends.sum(0).tolist(), strict=True):
        if differs:
            raise ValueError(
                f"ranks {dist.get_process_group_ranks(group)} share a sequence, but were given "
                f"other {name}: ranks of a context group take the same rows, whole"
            )
