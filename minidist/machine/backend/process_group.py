# torch's stubs declare overloads, of which it calls one.
# mypy: disable-error-code="override,assignment"
"""The backend "shm": the calls of `torch.distributed`, for tensors on the CPU.

torch calls these methods, with lists of tensors and an object of options. Each checks what this
rank can see, and then gives `_collective` its row of a table: what the call is named (all ranks
must make the same), which tensors it fills from which, by which of the `collectives`, and what that
costs on an emulated link.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from minidist.common.uncompiled import uncompiled
from minidist.instruments.link import steps
from minidist.machine.backend import collectives
from minidist.machine.backend.group import Cost, Flats, Group
from minidist.machine.backend.handle import Handle
from minidist.machine.backend.queues import Operation
from minidist.machine.backend.tensors import (
    Reduction,
    Tensors,
    describe,
    flatten,
    one_each,
    splits,
    together,
)

# The options of a call that is made without any.
ALL_REDUCE, REDUCE = dist.AllreduceOptions(), dist.ReduceOptions()
BROADCAST, REDUCE_SCATTER = dist.BroadcastOptions(), dist.ReduceScatterOptions()
GATHER, SCATTER = dist.GatherOptions(), dist.ScatterOptions()

Way = Callable[[list[steps.Step]], list[steps.Step]]  # as it is, or `steps.back`


@uncompiled
class ShmProcessGroup(Group):
    """Ranks that share memory. Made by `dist.init_process_group("shm")`, by
    `dist.new_group(backend="shm")`, and for meshes of such groups."""

    def allreduce(self, tensors: Tensors, opts: Any = ALL_REDUCE) -> Handle:
        return self._all_reduce("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = ALL_REDUCE) -> Handle:
        return self._all_reduce("all_reduce_coalesced", tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any = REDUCE) -> Handle:
        return self._all_reduce("reduce", tensors, opts, opts.rootRank)

    def _all_reduce(
        self, name: str, tensors: Tensors, opts: Any, root: int | None = None
    ) -> Handle:
        self._take(name, tensors)
        reduction = Reduction.of(name, opts.reduceOp, tensors, self.size())
        receivers, to = (range(self.size()), "") if root is None else ([root], f"dst={root}, ")
        nbytes = _nbytes(tensors)
        return self._collective(
            f"{name}({describe(*tensors)}, {to}op={reduction.name})",
            [([x], []) for x in tensors],
            lambda xs, _: collectives.all_reduce(self.members, xs[0], reduction, receivers),
            tensors,
            opts,
            self._ring(nbytes, 2) if root is None else self._tree(nbytes, root, steps.back),
            receives=self.rank() in receivers,
        )

    def broadcast(self, tensors: Tensors, opts: Any = BROADCAST) -> Handle:
        self._take("broadcast", tensors)
        return self._collective(
            f"broadcast({describe(*tensors)}, src={opts.rootRank})",
            [([x], []) for x in tensors],
            lambda xs, _: collectives.broadcast(self.members, xs[0], opts.rootRank),
            tensors,
            opts,
            self._tree(_nbytes(tensors), opts.rootRank),
            receives=self.rank() != opts.rootRank,
        )

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Handle:
        cost = self._ring(self.size() * _nbytes(inputs))
        return self._gather("all_gather", outputs, inputs, opts, cost)

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
            self._take("all_gather_single", [x], [output])
            together("all_gather_single", output, x, self.size())

        def by_dtype(outs: Flats, xs: Flats) -> Operation:
            for dtype in dict.fromkeys(x.dtype for x in xs):  # all of a dtype at once
                own = [x for x in xs if x.dtype == dtype]
                wholes = [out.view(self.size(), -1) for out in outs if out.dtype == dtype]
                by_rank, x = list(zip(*wholes, strict=True)), collectives.joined(own)
                x = torch.cat(own) if x is None else x
                yield from collectives.all_gather(self.members, by_rank, x)

        what, cost = f"all_gather_single({describe(*inputs)})", self._ring(_nbytes(outputs))
        return self._collective(what, [(outputs, inputs)], by_dtype, outputs, opts, cost)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = GATHER) -> Handle:
        cost = self._flat(self.size() * _nbytes(inputs), opts.rootRank, steps.back)
        return self._gather("gather", outputs, inputs, opts, cost, opts.rootRank)

    def _gather(
        self,
        name: str,
        outputs: Sequence[Tensors],
        inputs: Tensors,
        opts: Any,
        cost: Cost,
        root: int | None = None,
    ) -> Handle:
        """outputs: for each input one tensor a rank; none at all on a rank that is not the root."""
        groups = [(outs, [x]) for outs, x in zip(outputs or [[]], inputs, strict=True)]
        for outs, ins in groups:
            self._take(name, ins, outs)
            if root in (None, self.rank()):
                one_each(name, outs, ins[0], self.size())
        return self._collective(
            f"{name}({describe(*inputs)}{'' if root is None else f', dst={root}'})",
            groups,
            lambda outs, xs: collectives.all_gather(self.members, [[o] for o in outs], xs[0]),
            outputs,
            opts,
            cost,
        )

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = SCATTER) -> Handle:
        root = opts.rootRank == self.rank()
        parts = inputs[0] if inputs and root else []
        self._take("scatter", [*parts, *outputs])  # an expanded output takes its one value
        if root:
            one_each("scatter", parts, outputs[0], self.size())

        return self._collective(
            f"scatter({describe(*outputs)}, src={opts.rootRank})",
            [(outputs, parts)],
            lambda outs, ins: collectives.scatter(self.members, outs[0], ins, opts.rootRank),
            outputs,
            opts,
            self._flat(self.size() * _nbytes(outputs), opts.rootRank),
        )

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = REDUCE_SCATTER
    ) -> Handle:
        return self._reduce_scatter("reduce_scatter", outputs, inputs, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, x: torch.Tensor, opts: Any = REDUCE_SCATTER
    ) -> Handle:
        return self.reduce_scatter_single_coalesced([output], [x], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = REDUCE_SCATTER
    ) -> Handle:
        for output, x in zip(outputs, inputs, strict=True):
            self._take("reduce_scatter_single", [x])
            together("reduce_scatter_single", x, output, self.size())
        parts = [list(flatten(x).view(self.size(), -1)) for x in inputs]
        return self._reduce_scatter("reduce_scatter_single", outputs, parts, opts)

    def _reduce_scatter(
        self, name: str, outputs: Tensors, inputs: Sequence[Tensors], opts: Any
    ) -> Handle:
        for x, parts in zip(outputs, inputs, strict=True):
            self._take(name, parts, [x])
            one_each(name, parts, x, self.size())
        reduction = Reduction.of(name, opts.reduceOp, outputs, self.size())

        return self._collective(
            f"{name}({describe(*outputs)}, op={reduction.name})",
            [([x], parts) for x, parts in zip(outputs, inputs, strict=True)],
            lambda xs, parts: collectives.reduce_scatter(self.members, xs[0], parts, reduction),
            outputs,
            opts,
            self._ring(self.size() * _nbytes(outputs)),
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Handle:
        self._take("all_to_all", inputs, outputs)
        for tensors in (outputs, inputs):
            if len(tensors) != self.size() or {x.dtype for x in tensors} != {inputs[0].dtype}:
                raise ValueError(
                    f"all_to_all takes {self.size()} tensors of one dtype, one for each rank, "
                    f"not {describe(*tensors)}"
                )
        return self._all_to_all("all_to_all", outputs, inputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Handle:
        self._take("all_to_all_single", [x], [output])
        if output.dtype != x.dtype:
            raise ValueError(f"all_to_all_single: {describe(output)} from {describe(x)}")
        lengths = splits("all_to_all_single", x, input_splits, self.size())
        rooms = splits("all_to_all_single", output, output_splits, self.size())
        return self._all_to_all("all_to_all_single", [output], [x], opts, rooms, lengths)

    def _all_to_all(
        self,
        name: str,
        outputs: Tensors,
        inputs: Tensors,
        opts: Any,
        rooms: Sequence[int] = (),
        lengths: Sequence[int] = (),
    ) -> Handle:
        """Exchange one tensor for each rank; or the parts of a single one: `lengths[rank]` elements
        go to a rank, and `rooms[rank]` come from it."""
        sizes: list[list[int]] = []  # from each rank to each, in bytes, once they are known

        def exchange(outs: Flats, parts: Flats) -> Operation:
            if lengths:
                outs, parts = outs[0].split(rooms), parts[0].split(lengths)
            sizes.extend((yield from collectives.all_to_all(self.members, outs, parts)))

        what = f"{name}(dtype={inputs[0].dtype})"  # shapes may differ
        cost = Cost(_nbytes(inputs), lambda: steps.pairwise(sizes))
        return self._collective(what, [(outputs, inputs)], exchange, outputs, opts, cost)

    def barrier(self, opts: Any = None) -> Handle:
        cost = Cost(0, lambda: steps.dissemination(self.size()))
        agree = self.members.agree
        return self._collective("barrier()", [([], [])], lambda *_: agree(), [], opts, cost, False)

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
