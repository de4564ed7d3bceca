"""What holds a rank's memory, and when: parameters, gradients, activations, …."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from minidist.instruments.measure import record
from minidist.instruments.measure.meter import Measurement
from minidist.instruments.measure.storages import Ledger, Record


@dataclass(frozen=True)
class Phase:
    """A part of a training step. `start` and `end` are places in the lists of
    `MemoryTracker.history`: those of the bytes before its first change and after its last.
    Lesson: ddp_in_practice."""

    name: str
    start: int
    end: int


class MemoryTracker(Measurement):
    """Counts the bytes that live on one rank within a `with` block, by what they are.

        with md.measure.MemoryTracker(model, optimizer) as memory:
            loss_of(model(x), y).backward()
            optimizer.step()
        return memory           # plain data: a rank can return it, pickled

    After the block:

    - `history`: {category: [bytes, …]}, the live bytes at the start and after each allocation,
      free and resize;
    - `phases`: a list of `Phase`, by start: "forward", a call of `module`; "backward", one of
      `torch.autograd.backward` (`loss.backward()`) or `grad`; "step", one of `optimizer.step`;
    - `live`: {category: bytes} at the end of the block, and `after(phase)` at a phase's end;
    - `peak`: the most bytes that lived at once; `peak_of`: {category: the most of it};
      `most(*categories)`: the most of several together;
    - `rank`, ours.

    A storage has one category for all its life, the first of these that ever holds:

    - "parameters" and "buffers" of `module`;
    - "optimizer states": what `optimizer.state` holds, and parameters of the optimizer that are
      not the module's, such as a master copy in float32;
    - "gradients": what a parameter's `.grad` lies in, be it a bucket of many;
    - "activations": what autograd saved for backward, also what was received or is sent; or a hook
      of `saved_tensors_hooks` in its place: so also what a checkpoint computes again in backward;
    - "communication buffers": what else was handed to a collective, or sent or received;
    - "other": the results of all other ops.

    Counted is the memory of tensors on the device of the module's first parameter. Views, and
    parameters that are tied, count once. What was there before the block counts if it is one of
    the first five; a data set does not, even if autograd saves it. Bytes are those that torch
    asks for, on a CPU the same at every run, but for when the thread of a collective gives back
    what it has sent; the allocator of a GPU rounds them up to 512 a block. Not seen: memory that
    a kernel uses and frees within one op, that of libraries, and what other threads of the
    program make. What no op made, such as a deep copy or the bytes of an object that is gathered,
    is taken for what was there before.

    Raises RuntimeError when entered twice at the same time.
    Lesson: ddp_in_practice.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__()
        self._module, self._optimizer = module, optimizer
        self.history: dict[str, list[int]] = {}
        self.phases: list[Phase] = []
        self.live: dict[str, int] = {}
        self.peak_of: dict[str, int] = {}
        self.peak = 0

    def after(self, phase: str) -> dict[str, int]:
        """{category: live bytes} at the end of the last phase of this name.

        Raises ValueError, with the names there are, if there was none.
        """
        ends = {phase.name: phase.end for phase in self.phases}
        if phase not in ends:
            raise ValueError(f"no phase {phase!r}; there are: {', '.join(ends) or 'none'}")
        return {category: nbytes[ends[phase]] for category, nbytes in self.history.items()}

    def at_peak(self) -> dict[str, int]:
        """{category: live bytes} at the moment when most bytes lived. Lesson: offload."""
        totals = list(map(sum, zip(*self.history.values(), strict=True)))
        top = totals.index(max(totals))
        return {category: live[top] for category, live in self.history.items() if live[top]}

    def most(self, *categories: str) -> int:
        """The most bytes that these categories held at one time, together."""
        return max(map(sum, zip(*(self.history[kind] for kind in categories), strict=True)))

    def __repr__(self) -> str:
        live = sum(self.live.values())
        return f"MemoryTracker(rank {self.rank}: peak {self.peak} bytes, {live} at the end)"

    def _begin(self, block: contextlib.ExitStack) -> None:
        MemoryTracker.__init__(self, self._module, self._optimizer)
        held = [*self._module.parameters(), *self._module.buffers()]
        device = next((tensor.device for tensor in held if not tensor.is_meta), torch.device("cpu"))
        self._ledger, self._open = self._make_ledger(device), list[tuple[str, int]]()
        # The nodes that add up gradients, by parameter.
        self._nodes: dict[torch.Tensor, Any] = {}
        # What holds a gradient that has come, and the rank of that before.
        self._came: dict[torch.Tensor, list[tuple[Record, int]]] = {}
        self._look()
        for handle in self._hooks():
            block.callback(handle.remove)
        for function in (torch.autograd.backward, torch.autograd.grad):
            watched = self._watched(function)
            block.enter_context(_replaced(torch.autograd, function.__name__, watched))
        resize = self._resize(torch.UntypedStorage.resize_)
        block.enter_context(_replaced(torch.UntypedStorage, "resize_", resize))
        block.enter_context(saved_tensors_hooks(self._save, _saved))
        block.enter_context(_replaced(saved_tensors_hooks, "__init__", self._hooking()))
        sent = functools.partial(self._ledger.mark, category="communication buffers")
        block.enter_context(record.handed_over(sent))
        block.enter_context(self._ledger)
        block.callback(self._look)  # the first to be called back

    def _make_ledger(self, device: torch.device) -> Ledger:
        return Ledger(device)

    def _end(self) -> None:
        self.phases.sort(key=lambda phase: (phase.start, -phase.end))
        self.history = self._ledger.history()
        self.live = {category: nbytes[-1] for category, nbytes in self.history.items()}
        self.peak_of = {category: max(nbytes) for category, nbytes in self.history.items()}
        self.peak = max(map(sum, zip(*self.history.values(), strict=True)))
        del self._ledger, self._open, self._nodes, self._came

    def _look(self) -> None:
        """Find out what the module and the optimizer hold now."""
        mark, parameters = self._ledger.mark, list(self._module.parameters())
        for module in self._module.modules():  # where ranks keep shards (lesson: fully_sharded)
            if (shard := getattr(module, "flat_shard", None)) is not None:
                self._ledger.join(*shard)
                mark(module.unsharded, "parameters")
        mark(parameters, "parameters")
        # A node holds its parameter: let go of one that a wrapper has replaced within the block.
        for replaced in self._nodes.keys() - set(parameters):
            del self._nodes[replaced]
        mark(list(self._module.buffers()), "buffers")
        if self._optimizer is not None:
            groups = [group["params"] for group in self._optimizer.param_groups]
            mark((dict(self._optimizer.state), groups), "optimizer states")
            parameters += [parameter for group in groups for parameter in group]
            parameters += getattr(self._optimizer, "shards", [])  # of parameters (lesson: offload)
        mark([parameter.grad for parameter in parameters], "gradients")

    def _hooks(self) -> Iterator[Any]:
        """Everything that is told when a phase begins or ends, or a gradient is there."""
        begin, end, module = self._begin_phase, self._end_phase, self._module
        yield module.register_forward_pre_hook(lambda *_: begin("forward"), prepend=True)
        yield module.register_forward_hook(lambda *_: end("forward"), always_call=True)
        if self._optimizer is not None:
            yield self._optimizer.register_step_pre_hook(lambda *_: begin("step"))
            yield self._optimizer.register_step_post_hook(lambda *_: end("step"))
        trained = [p for p in module.parameters() if p.requires_grad]
        # Of the parameter first, and of the node that adds up its gradient when all others of the
        # parameter, and the wrapper, have seen that. A parameter does not hold its node.
        self._nodes = {parameter: get_gradient_edge(parameter).node for parameter in trained}
        for parameter, node in self._nodes.items():
            yield parameter.register_post_accumulate_grad_hook(self._gradient_came)
            yield node.register_hook(functools.partial(self._gradient_stays, parameter))

    def _gradient_came(self, parameter: torch.Tensor) -> None:
        holders = self._ledger.records(parameter.grad)
        self._came[parameter] = [(record, record.rank) for record in holders]
        self._ledger.mark(parameter.grad, "gradients")

    def _gradient_stays(self, parameter: torch.Tensor, *_: Any) -> None:
        came = self._came.pop(parameter, ())
        if parameter.grad is not None:  # not used up by another hook
            self._ledger.mark(parameter.grad, "gradients")
            there = self._ledger.records(parameter.grad)
            for record, rank in came:
                if record not in there:  # copied into a bucket
                    record.rank = rank

    def _begin_phase(self, name: str) -> None:
        self._look()
        self._open.append((name, len(self._ledger.changes)))

    def _end_phase(self, name: str) -> None:
        self._look()
        while self._open[-1][0] != name:
            self._open.pop()  # a step that raised: its end was not told, and it is no phase
        self.phases.append(Phase(*self._open.pop(), len(self._ledger.changes)))

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def backward(*args: Any, **kwargs: Any) -> Any:
            self._begin_phase("backward")
            try:
                return function(*args, **kwargs)
            finally:
                self._end_phase("backward")

        return backward

    def _resize(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        # A sharded parameter's storage is resized to 0 and back, with no op of a tensor.
        @functools.wraps(resize)
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._ledger.measure(storage)
            return result

        return resize_

    def _save(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        self._ledger.mark(tensor, "activations", admit=False)
        # Saved as it is, the result of an op would hold the node that holds it, for ever.
        return tensor.detach(), tensor._version

    def _hooking(self) -> Callable[..., None]:
        # Of hooks that nest, autograd calls the innermost alone: what that keeps is marked, too.
        init = saved_tensors_hooks.__init__

        @functools.wraps(init)
        def hooks(block: Any, pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
            def watched(tensor: torch.Tensor) -> Any:
                kept = pack(tensor)
                self._ledger.mark(kept, "activations", admit=False)
                return kept

            init(block, watched, unpack)

        return hooks


def _saved(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = saved
    if tensor._version != version:  # with hooks, autograd does not look itself
        raise RuntimeError(
            "a tensor that backward needs was changed in place: "
            f"its version is {tensor._version}, not {version}"
        )
    return tensor


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within the block `owner.name` is `value`; after it, what it was, if only inherited."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        if own is not None:
            setattr(owner, name, own)
