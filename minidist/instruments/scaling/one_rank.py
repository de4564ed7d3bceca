"""One rank of a thousand, alone in its process: it talks to nobody, and its tensors have no memory.

The group is torch's own "fake" one, which knows all ranks and sends nothing. The tensors are on the
device "meta", of which torch computes shapes alone. So the strategies run as they are, and what
would travel is noted. Lesson: scaling_out
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.fx.experimental import _config as fx_config
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any

from minidist.distributed_data_parallel.reducer import Reducer
from minidist.fully_sharded import fully_sharded_data_parallel as wrapper
from minidist.fully_sharded import param_group
from minidist.instruments.measure.flops import FORMULAS
from minidist.pipeline import pipeline

aten = torch.ops.aten


class Message(NamedTuple):
    """A collective, or a message to another rank: `nbytes` of the whole vector, n in
    `md.collectives.cost`, on a group of these ranks."""

    operation: str
    nbytes: int
    group: tuple[int, ...]


class Waited(NamedTuple):
    """The rank waits here for the message of this number (in `Trace.messages`)."""

    message: int


@dataclass
class Trace:
    """What a rank has done, in order: a number is so many floating-point operations, a Message
    begins here, a Waited ends one. Agreement between ranks (objects, rows of a batch) is not in
    it. `noting`: whether it is written now."""

    events: list[float | Message | Waited] = field(default_factory=list)
    noting: bool = True

    @property
    def messages(self) -> list[Message]:
        return [event for event in self.events if isinstance(event, Message)]

    @property
    def flops(self) -> float:
        return sum(event for event in self.events if not isinstance(event, Message | Waited))

    def clear(self) -> None:
        self.events.clear()


@contextmanager
def one_rank_of(world_size: int, rank: int = 0) -> Iterator[Trace]:
    """Within the block this process is one of `world_size` ranks, alone. Lesson: scaling_out.

        with scaling.one_rank_of(1024) as trace:
            with torch.device("meta"):
                model = Model()
            model = md.FullyShardedDataParallel(model, param_init_fn=lambda module: None)
            model(torch.empty(8, 128, device="meta")).sum().backward()
        trace.messages

    What needs the others' numbers gets this rank's own: an agreement compares with itself, so it
    cannot fail. What needs the value of a number that has none gets 1, or True; "is any of these
    wrong?" gets False. A message begins and is there. So shapes, bytes, messages and their order
    are what they are on a cluster, unless they depend on values, and nothing else is.

    In a pipeline this is true of rank 0 only: the others learn from it what will come to them.

    Raises RuntimeError if this process is in a group already, ValueError if there is no such rank;
    within the block, NotImplementedError for a collective that it cannot note.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is a rank already: call one_rank_of outside of md.ranks")
    if not 0 <= rank < world_size:
        raise ValueError(f"there is no rank {rank} of {world_size}")
    trace = Trace()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with ExitStack() as block:
            for name, stand_in in _stand_ins(trace).items():
                block.enter_context(mock.patch.object(dist, name, stand_in))
            # A model stays on "meta", which is no mistake here. Agreement stays on the CPU.
            block.enter_context(mock.patch.object(param_group, "ON_META", ""))
            block.enter_context(mock.patch.object(wrapper, "materialize", lambda *_: None))
            block.enter_context(
                mock.patch.object(pipeline, "fill", lambda stages, plan, ties, *_: ties)
            )
            meta = torch.device("meta")
            block.enter_context(mock.patch.object(pipeline, "device", lambda _: meta))
            # The order of its buckets would be learnt from numbers of rank 0.
            block.enter_context(mock.patch.object(Reducer, "may_rebuild", False))
            no = partial(_no_autocast, torch.is_autocast_enabled)
            block.enter_context(mock.patch.object(torch, "is_autocast_enabled", no))
            block.enter_context(
                mock.patch.object(fx_config, "meta_nonzero_assume_all_nonzero", True)
            )
            block.enter_context(_WithoutNumbers(trace))
            yield trace
    finally:
        dist.destroy_process_group()


class _WithoutNumbers(TorchDispatchMode):
    """Counts operations, and answers for numbers that tensors on "meta" have not."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        op = func._overloadpacket
        if op in (aten._local_scalar_dense, aten._to_copy, aten.any) and _on_meta(args):
            x = args[0]
            if op is aten._local_scalar_dense:
                return torch.ones((), dtype=x.dtype).item()
            if op is aten.any:  # of what is wrong
                return torch.zeros((), dtype=torch.bool)
            if torch.device(kwargs.get("device") or "meta").type == "cpu":
                return torch.ones(x.shape, dtype=kwargs.get("dtype") or x.dtype)
        result = func(*args, **kwargs)
        if op in FORMULAS and self._trace.noting:
            self._trace.events.append(FORMULAS[op](*args, **kwargs, out_val=result))
        return result


def _on_meta(args: Any) -> bool:
    return tree_any(lambda x: isinstance(x, torch.Tensor) and x.is_meta, args)


def _no_autocast(ask: Callable[..., bool], *device: str) -> bool:
    """Torch raises an error if asked about "meta"."""
    return device != ("meta",) and ask(*device)


# ---- in place of torch's functions -------------------------------------------------------------

UNKNOWN = (  # torch's fake group would let them pass unseen
    *("all_gather", "reduce_scatter", "all_to_all", "all_to_all_single", "reduce", "gather"),
    *("scatter", "send", "recv", "batch_isend_irecv"),
)


class _Done(dist.Work):
    """The handle of a message that is there."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self._end: Callable[[], None] | None = end

    def wait(self, *_: Any) -> bool:
        if self._end is not None:
            self._end()
        self._end = None
        return True

    def is_completed(self) -> bool:
        return True


def _stand_ins(trace: Trace) -> dict[str, Callable[..., Any]]:
    """Functions of torch.distributed as this rank sees them."""

    def begin(operation: str, tensor: torch.Tensor, group: Any) -> _Done:
        if not (trace.noting and tensor.is_meta):
            return _Done(lambda: None)
        number = len(trace.messages)
        ranks = tuple(dist.get_process_group_ranks(group))
        trace.events.append(Message(operation, tensor.nbytes, ranks))
        return _Done(lambda: trace.events.append(Waited(number)))

    def now_or_later(work: _Done, async_op: bool) -> _Done | None:
        if async_op:
            return work
        work.wait()
        return None

    def all_reduce(
        tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if tensor.dtype is torch.uint8:  # flags, on which the ranks agree
            return now_or_later(_Done(lambda: None), async_op)
        return now_or_later(begin("all_reduce", tensor, group), async_op)

    def broadcast(
        tensor: Any, src: Any = None, group: Any = None, async_op: bool = False, **_: Any
    ) -> Any:
        return now_or_later(begin("broadcast", tensor, group), async_op)

    def all_gather(whole: Any, own: Any, group: Any = None, async_op: bool = False) -> Any:
        for piece in whole.chunk(dist.get_world_size(group)) if not whole.is_meta else ():
            piece.copy_(own)
        return now_or_later(begin("all_gather", whole, group), async_op)

    def reduce_scatter(
        own: Any, whole: Any, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Any:
        return now_or_later(begin("reduce_scatter", whole, group), async_op)

    def isend(tensor: Any, dst: Any = None, group: Any = None, *_: Any, **__: Any) -> Any:
        return begin("send", tensor, group)

    def irecv(tensor: Any, src: Any = None, group: Any = None, *_: Any, **__: Any) -> Any:
        return begin("receive", tensor, group)

    def all_gather_object(everyone: list[Any], mine: Any, group: Any = None) -> None:
        everyone[:] = [mine] * len(everyone)

    def broadcast_object_list(told: list[Any], *_: Any, **__: Any) -> None:
        """Rank 0's own, or nothing that it would use."""

    def unknown(name: str, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"one_rank_of cannot note {name}. It knows all_reduce, broadcast, all_gather_single, "
            "reduce_scatter_single, isend and irecv"
        )

    return {
        **{name: partial(unknown, name) for name in UNKNOWN},
        "all_reduce": all_reduce,
        "broadcast": broadcast,
        # By torch's old names too, which would call the new ones behind our back.
        "all_gather_into_tensor": all_gather,
        "reduce_scatter_tensor": reduce_scatter,
        "all_gather_single": all_gather,
        "reduce_scatter_single": reduce_scatter,
        "isend": isend,
        "irecv": irecv,
        "all_gather_object": all_gather_object,
        "broadcast_object_list": broadcast_object_list,
    }
