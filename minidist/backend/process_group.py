# torch's stubs declare overloads, of which it calls one.
# mypy: disable-error-code="override,assignment"
"""The backend "shm": the calls of `torch.distributed`, for tensors on the CPU.

torch calls these methods, with a list of tensors and an object of options; what they do with memory
is in `operations`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from minidist.backend import checks, operations
from minidist.backend.all_reduce import all_reduce
from minidist.backend.checks import describe
from minidist.backend.group import Cost, Group, Tensors, flatten, put_back
from minidist.backend.handle import Handle
from minidist.backend.queues import Operation
from minidist.backend.reduction import Reduction
from minidist.backend.staging import joined
from minidist.backend.uncompiled import uncompiled
from minidist.link import steps

Way = Callable[[list[steps.Step]], list[steps.Step]]  # as it is, or `steps.back`


@uncompiled
class ShmProcessGroup(Group):
    """Ranks that share memory. Made by `dist.init_process_group("shm")`, by
    `dist.new_group(backend="shm")`, and for meshes of such groups."""

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Handle:
        opts = opts or dist.AllreduceOptions()
        return self._all_reduce("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Handle:
        opts = opts or dist.AllreduceCoalescedOptions()
        return self._all_reduce("all_reduce_coalesced", tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Handle:
        opts = opts or dist.ReduceOptions()
        return self._all_reduce("reduce", tensors, opts, opts.rootRank)

    def _all_reduce(
        self, name: str, tensors: Tensors, opts: Any, root: int | None = None
    ) -> Handle:
        reduction = self._reduction(name, opts.reduceOp, tensors)
        receivers, to = (range(self.size()), "") if root is None else ([root], f"dst={root}, ")

        def run() -> Operation:
            for x in tensors:
                flat = flatten(x)
                yield from all_reduce(self.members, flat, reduction, receivers)
                if self.rank() in receivers:
                    put_back(x, flat)

        what, nbytes = f"{name}({describe(*tensors)}, {to}op={reduction.name})", _nbytes(tensors)
        cost = self._ring(nbytes, 2) if root is None else self._tree(nbytes, root, steps.back)
        return self._collective(what, run(), list(tensors), opts, cost)

    def _reduction(self, name: str, op: Any, tensors: Tensors) -> Reduction:
        self._take(name, tensors)
        return Reduction.of(name, op, tensors, self.size())

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Handle:
        opts = opts or dist.BroadcastOptions()
        self._take("broadcast", tensors)

        def run() -> Operation:
            for x in tensors:
                flat = flatten(x)
                yield from operations.broadcast(self.members, flat, opts.rootRank)
                if self.rank() != opts.rootRank:
                    put_back(x, flat)

        what = f"broadcast({describe(*tensors)}, src={opts.rootRank})"
        cost = self._tree(_nbytes(tensors), opts.rootRank)
        return self._collective(what, run(), list(tensors), opts, cost)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Handle:
        for outs, x in zip(outputs, inputs, strict=True):
            self._take("all_gather", [x, *outs])
            checks.writable("all_gather", outs)
            checks.one_each("all_gather", outs, x, self.size())

        def run() -> Operation:
            for outs, x in zip(outputs, inputs, strict=True):
                yield from self._gather(outs, x)

        cost = self._ring(self.size() * _nbytes(inputs))
        return self._collective(
            f"all_gather({describe(*inputs)})", run(), list(outputs), opts, cost
        )

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> Handle:
        # outputs[rank][tensor], the other way round than in allgather
        by_tensor = [list(outs) for outs in zip(*outputs, strict=True)]
        return self.allgather(by_tensor, inputs, opts)

    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Handle:
        return self.all_gather_single_coalesced([output], [x], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Handle:
        for output, x in zip(outputs, inputs, strict=True):
            self._take("all_gather_single", [output, x])
            checks.writable("all_gather_single", [output])
            checks.together("all_gather_single", output, x, self.size())

        def run() -> Operation:
            flats, parts = [flatten(output) for output in outputs], [flatten(x) for x in inputs]
            for dtype in dict.fromkeys(x.dtype for x in inputs):  # all of a dtype at once
                wholes = [flat.view(self.size(), -1) for flat in flats if flat.dtype == dtype]
                own = [part for part in parts if part.dtype == dtype]
                x = joined(own)
                by_rank = list(zip(*wholes, strict=True))
                x = torch.cat(own) if x is None else x
                yield from operations.all_gather(self.members, by_rank, x)
            for output, flat in zip(outputs, flats, strict=True):
                put_back(output, flat)

        what, cost = f"all_gather_single({describe(*inputs)})", self._ring(_nbytes(outputs))
        return self._collective(what, run(), list(outputs), opts, cost)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Handle:
        opts = opts or dist.GatherOptions()
        self._take("gather", [*inputs, *(outputs[0] if outputs else [])])
        if outputs:
            checks.writable("gather", outputs[0])
            checks.one_each("gather", outputs[0], inputs[0], self.size())

        def run() -> Operation:
            yield from self._gather(outputs[0] if outputs else [], inputs[0])

        what = f"gather({describe(*inputs)}, dst={opts.rootRank})"
        cost = self._flat(self.size() * _nbytes(inputs), opts.rootRank, steps.back)
        return self._collective(what, run(), list(outputs), opts, cost)

    def _gather(self, outs: Any, x: torch.Tensor) -> Operation:
        flats = [flatten(out) for out in outs]
        yield from operations.all_gather(self.members, [[flat] for flat in flats], flatten(x))
        for out, flat in zip(outs, flats, strict=True):
            put_back(out, flat)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Handle:
        opts = opts or dist.ScatterOptions()
        self._take("scatter", [*outputs, *(inputs[0] if inputs else [])])
        if inputs:
            checks.one_each("scatter", inputs[0], outputs[0], self.size())

        def run() -> Operation:
            parts = [flatten(part) for part in (inputs[0] if inputs else [])]
            flat = flatten(outputs[0])
            yield from operations.scatter(self.members, flat, parts, opts.rootRank)
            put_back(outputs[0], flat)

        what = f"scatter({describe(*outputs)}, src={opts.rootRank})"
        cost = self._flat(self.size() * _nbytes(outputs), opts.rootRank)
        return self._collective(what, run(), list(outputs), opts, cost)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None
    ) -> Handle:
        opts = opts or dist.ReduceScatterOptions()
        return self._reduce_scatter("reduce_scatter", outputs, inputs, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, x: torch.Tensor, opts: Any = None
    ) -> Handle:
        return self.reduce_scatter_single_coalesced([output], [x], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Handle:
        opts = opts or dist.ReduceScatterOptions()
        for output, x in zip(outputs, inputs, strict=True):
            self._take("reduce_scatter_single", [x])
            checks.together("reduce_scatter_single", x, output, self.size())
        parts = [list(flatten(x).view(self.size(), -1)) for x in inputs]
        return self._reduce_scatter("reduce_scatter_single", outputs, parts, opts)

    def _reduce_scatter(
        self, name: str, outputs: Tensors, inputs: Sequence[Tensors], opts: Any
    ) -> Handle:
        reduction = self._reduction(name, opts.reduceOp, outputs)
        checks.writable(name, outputs)
        for x, parts in zip(outputs, inputs, strict=True):
            self._take(name, parts)
            checks.one_each(name, parts, x, self.size())

        def run() -> Operation:
            for x, parts in zip(outputs, inputs, strict=True):
                flat, flats = flatten(x), [flatten(part) for part in parts]
                yield from operations.reduce_scatter(self.members, flat, flats, reduction)
                put_back(x, flat)

        what = f"{name}({describe(*outputs)}, op={reduction.name})"
        cost = self._ring(self.size() * _nbytes(outputs))
        return self._collective(what, run(), list(outputs), opts, cost)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Handle:
        self._take("all_to_all", [*outputs, *inputs])
        checks.writable("all_to_all", outputs)
        for tensors in (outputs, inputs):
            if len(tensors) != self.size() or {x.dtype for x in tensors} != {inputs[0].dtype}:
                raise ValueError(
                    f"all_to_all takes {self.size()} tensors of one dtype, one for each rank, "
                    f"not {describe(*tensors)}"
                )

        sizes: list[list[int]] = []  # from each rank to each, in bytes, once they are known

        def run() -> Operation:
            outs, parts = [flatten(out) for out in outputs], [flatten(part) for part in inputs]
            sizes.extend((yield from operations.all_to_all(self.members, outs, parts)))
            for out, flat in zip(outputs, outs, strict=True):
                put_back(out, flat)

        what = f"all_to_all(dtype={inputs[0].dtype})"  # shapes may differ
        cost = Cost(_nbytes(inputs), lambda: steps.pairwise(sizes))
        return self._collective(what, run(), list(outputs), opts, cost)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Handle:
        self._take("all_to_all_single", [output, x])
        checks.writable("all_to_all_single", [output])
        if output.dtype != x.dtype:
            raise ValueError(f"all_to_all_single: {describe(output)} from {describe(x)}")
        lengths = checks.splits("all_to_all_single", x, input_splits, self.size())
        rooms = checks.splits("all_to_all_single", output, output_splits, self.size())

        sizes: list[list[int]] = []  # from each rank to each, in bytes, once they are known

        def run() -> Operation:
            flat = flatten(output)
            parts = flatten(x).split(lengths)
            sizes.extend((yield from operations.all_to_all(self.members, flat.split(rooms), parts)))
            put_back(output, flat)

        what = f"all_to_all_single(dtype={x.dtype})"
        cost = Cost(x.nbytes, lambda: steps.pairwise(sizes))
        return self._collective(what, run(), [output], opts, cost)

    def barrier(self, opts: Any = None) -> Handle:
        operation = operations.barrier(self.members)
        cost = Cost(0, lambda: steps.dissemination(self.size()))
        return self._collective("barrier()", operation, [], opts, cost)

    # ---- what they cost on an emulated link ------------------------------------------------

    def _ring(self, nbytes: int, rounds: int = 1) -> Cost:
        return Cost(nbytes, lambda: steps.ring(self.size(), nbytes, rounds))

    def _tree(self, nbytes: int, root: int, way: Way = list) -> Cost:
        return Cost(nbytes, lambda: way(steps.tree(self.size(), nbytes, root)))

    def _flat(self, nbytes: int, root: int, way: Way = list) -> Cost:
        return Cost(nbytes, lambda: way(steps.flat(self.size(), nbytes, root)))

    # torch 2.11 has these names.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _nbytes(tensors: Tensors) -> int:
    return sum(x.nbytes for x in tensors)
