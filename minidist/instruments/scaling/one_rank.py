# torch's stubs declare overloads, of which it calls one.
# mypy: disable-error-code="override"
"""One rank of a thousand, alone in its process: it talks to nobody, and its tensors have no memory.

Its process group knows all ranks and sends nothing: it notes what would travel. The tensors are on
the device "meta", of which torch computes shapes alone. So the strategies run as they are; where
they would give a model memory, they ask `is_rehearsal`. Lesson: scaling_out
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.fx.experimental import _config as fx_config
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any

from minidist.common.groups import REHEARSAL
from minidist.instruments.measure.flops import FORMULAS

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
    it."""

    events: list[float | Message | Waited] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        return [event for event in self.events if isinstance(event, Message)]

    @property
    def flops(self) -> float:
        return sum(event for event in self.events if not isinstance(event, Message | Waited))

    def clear(self) -> None:
        self.events.clear()


@contextmanager
def one_rank_of(world_size: int) -> Iterator[Trace]:
    """Within the block this process is rank 0 of `world_size` ranks, alone. Lesson: scaling_out.

        with scaling.one_rank_of(1024) as trace:
            with torch.device("meta"):
                model = Model()
            model = md.FullyShardedDataParallel(model)
            model(torch.empty(8, 128, device="meta")).sum().backward()
        trace.messages

    What needs the others' numbers gets this rank's own: an agreement compares with itself, so it
    cannot fail. What needs the value of a number that has none gets 1, or True; "is any of these
    wrong?" gets False. A message begins and is there. So shapes, bytes, messages and their order
    are what they are on a cluster, unless they depend on values, and nothing else is.

    Raises RuntimeError if this process is in a group already, ValueError for less than one rank;
    within the block, NotImplementedError for a collective that it cannot note.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is a rank already: call one_rank_of outside of md.ranks")
    if world_size < 1:
        raise ValueError(f"there is no rank 0 of {world_size}")
    trace = Trace()
    OneRank.trace = trace
    # Torch's groups need a store on which ranks meet; in this one nobody is awaited.
    dist.init_process_group(REHEARSAL, store=FakeStore(), rank=0, world_size=world_size)
    try:
        with (
            fx_config.patch(meta_nonzero_assume_all_nonzero=True),  # type: ignore[attr-defined]
            mock.patch.object(torch, "is_autocast_enabled", _no_autocast_on_meta),
            _WithoutNumbers(trace),
        ):
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
        if op in FORMULAS:
            self._trace.events.append(FORMULAS[op](*args, **kwargs, out_val=result))
        return result


def _on_meta(args: Any) -> bool:
    return tree_any(lambda x: isinstance(x, torch.Tensor) and x.is_meta, args)


_is_autocast_enabled = torch.is_autocast_enabled


def _no_autocast_on_meta(*device: str) -> bool:
    """Torch raises an error if asked about "meta"."""
    return device != ("meta",) and _is_autocast_enabled(*device)


# ---- the process group -------------------------------------------------------------------------


class Done(dist.Work):
    """The handle of a message that is there."""

    def __init__(self, end: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._end = end

    def wait(self, *_: Any) -> bool:
        if self._end is not None:
            self._end()
        self._end = None
        return True

    def is_completed(self) -> bool:
        return True


class OneRank(dist.ProcessGroup):
    """Torch calls these methods, with tensors and an object of options. Of a tensor on the CPU, by
    which ranks agree, every rank has what this one has; nothing of it is noted."""

    trace: Trace

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        self._name = ""

    def _begin(self, operation: str, whole: torch.Tensor) -> Done:
        if not whole.is_meta:
            return Done()
        trace, number = self.trace, len(self.trace.messages)
        trace.events.append(Message(operation, whole.nbytes, self._ranks))
        return Done(lambda: trace.events.append(Waited(number)))

    def allreduce(self, tensors: Any, _: Any = None) -> Done:
        return self._begin("all_reduce", tensors[0])

    def broadcast(self, tensors: Any, _: Any = None) -> Done:
        return self._begin("broadcast", tensors[0])

    def allgather(self, outputs: Any, inputs: Any, _: Any = None) -> Done:
        if inputs[0].is_meta:
            _unknown(self, "all_gather")
        for each in outputs[0]:
            each.copy_(inputs[0])
        return Done()

    def all_gather_single(self, whole: torch.Tensor, own: torch.Tensor, _: Any = None) -> Done:
        for piece in whole.chunk(self.size()) if not whole.is_meta else ():
            piece.copy_(own)
        return self._begin("all_gather", whole)

    def reduce_scatter_single(self, own: torch.Tensor, whole: torch.Tensor, _: Any = None) -> Done:
        return self._begin("reduce_scatter", whole)

    def send(self, tensors: Any, *_: Any) -> Done:
        return self._begin("send", tensors[0])

    def recv(self, tensors: Any, *_: Any) -> Done:
        return self._begin("receive", tensors[0])

    # ---- what torch asks a group -----------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def getBackendName(self) -> str:  # noqa: N802
        return REHEARSAL

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    @property
    def group_name(self) -> str:
        return self._name


def _unknown(_: OneRank, name: str, *__: Any) -> None:
    raise NotImplementedError(
        f"one_rank_of cannot note {name}. It knows all_reduce, broadcast, all_gather_single, "
        "reduce_scatter_single, send and recv"
    )


for _name in (  # torch's own class would let them pass unseen
    *("all_to_all_single", "alltoall", "reduce", "gather", "scatter", "reduce_scatter"),
    *("all_gather_single_coalesced", "reduce_scatter_single_coalesced"),
):
    setattr(OneRank, _name, partialmethod(_unknown, _name))

dist.Backend.register_backend(
    REHEARSAL, lambda options, _: OneRank(options), extended_api=True, devices=["cpu", "meta"]
)
