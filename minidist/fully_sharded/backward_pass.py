"""The way back: a backward pass gathers units again, frees them, and reduces their gradients.

    gather 3 | compute 3 | compute 2 | compute 1
               gather 2    gather 1
                           reduce 3    reduce 2    reduce 1

Every rank goes back through the same units, as it went forward through the same ones.
Zhao et al., "PyTorch FSDP" (arXiv 2304.11277), sections 3.3 and 4. Lesson: fully_sharded
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.profiler import record_function

from minidist.fully_sharded.param_group import Gradients, ParamGroup


class UnitPass:
    """A forward pass of a unit, and the one that ended before it, which is next in the backward
    pass."""

    def __init__(self, group: ParamGroup) -> None:
        self.group = group
        self.previous: UnitPass | None = group.before
        self.since = torch.autograd._get_sequence_nr()  # the first node of its graph


class Ahead:
    """The units that are gathered before their time, while another one computes."""

    def __init__(self) -> None:
        self._groups: list[ParamGroup] = []

    def prefetch(self, groups: list[ParamGroup]) -> None:
        """Begin to gather these, and free all others that nobody has used."""
        for group in self._groups:
            if group not in groups:
                group.reshard()
        self._groups = [group for group in groups if group in self._groups or not group.unsharded]
        for group in self._groups:
            with record_function(f"fsdp.unshard {group.name}"):
                group.unshard()

    def use(self, group: ParamGroup) -> None:
        """Its time has come."""
        if group in self._groups:
            self._groups.remove(group)

    def forget(self) -> None:
        """Leave them as they are."""
        self._groups = []


class BackwardPass:
    """One backward pass of autograd over the units of a root."""

    def __init__(
        self,
        groups: list[ParamGroup],
        ahead: Ahead,
        on_gradients: Callable[[UnitPass], Callable[[Gradients], None]],
    ) -> None:
        """`on_gradients` says what autograd calls when it has gone through a unit."""
        self._groups, self._ahead, self._on_gradients = groups, ahead, on_gradients
        self._opened: list[UnitPass] = []  # to which it has come
        self._in_flight: ParamGroup | None = None  # its gradient is being reduced
        self._reduced: dict[ParamGroup, list[bool]] = {}  # which parameters have a gradient
        self._unreduced = set[ParamGroup]()  # they have new gradients
        self.trains = False  # it has made gradients of parameters

    def pre_backward(self, this: UnitPass) -> None:
        """Autograd is about to go back through a unit: gather it, and begin to gather the next."""
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of gradients are not reduced: create_graph=True")
        group = this.group
        if this in group.readers:
            return
        self._opened.append(this)
        self._ahead.use(group)
        group.readers.add(this)
        # A checkpoint within the unit computes again with these.
        with torch.enable_grad(), record_function(f"fsdp.pre_backward {group.name}"):
            group.wait_for_unshard(self._on_gradients(this))
        if group.next_backward is not None:
            self._ahead.prefetch(group.next_backward)
        elif this.previous is not None and this.previous not in self._opened:
            self._ahead.prefetch([this.previous.group])

    def post_backward(self, this: UnitPass, gradients: Gradients) -> None:
        """It has gone through the unit, and has these gradients: free it, and begin to reduce."""
        self.trains = True
        this.group.add(gradients)
        self._unreduced.add(this.group)
        self._close(this)

    def _close(self, this: UnitPass) -> None:
        """Free the parameters, and begin to reduce their gradient."""
        group = this.group
        group.readers.discard(this)
        if group.readers:
            return
        with record_function(f"fsdp.post_backward {group.name}"):
            group.reshard() if group.reshards_after_backward else group.to_sharded()
            if group in self._unreduced:
                self._reduce(group) if group.syncs else group.leave()
                self._unreduced.discard(group)

    def _reduce(self, group: ParamGroup) -> None:
        if self._in_flight is not None:
            self._in_flight.wait_for_reduce()  # no more than one is in flight
        self._in_flight = group
        before, now = self._reduced.get(group), group.has_gradients()
        self._reduced[group] = [a or b for a, b in zip(before or now, now, strict=True)]
        group.reduce()

    def close_all(self) -> None:
        """Nothing is read any more."""
        for this in self._opened:
            this.group.readers.discard(this)

    def root_post_backward(self) -> None:
        """Before `backward()` returns: the gradients are complete. A parameter without gradient on
        some ranks counts there as zero. The optimizer passes over it if it has none on any."""
        if not self.trains:
            return
        for this in self._opened:
            self._close(this)  # no gradient came of it
        for group in self._groups:
            if group.syncs and group.trained and (group in self._unreduced or group.has_left):
                self._reduce(group)
        with record_function("fsdp.root_post_backward"):
            self._ahead.prefetch([])  # a hook of a parameter may be an optimizer's step
            for group in self._reduced:
                group.wait_for_reduce()
            if not self._reduced:
                return
            flags = [flag for touched in self._reduced.values() for flag in touched]
            options = self._groups[0].options
            together = torch.tensor(flags, dtype=torch.uint8, device=options.mesh.device_type)
            for replicas in options.groups:
                dist.all_reduce(together, dist.ReduceOp.MAX, replicas)
            anywhere = iter(together.bool().tolist())
            for group in self._reduced:
                group.deliver(anywhere)
