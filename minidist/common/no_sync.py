"""Accumulation: backward passes whose gradients stay on their rank until a later one."""

from collections.abc import Iterator
from contextlib import contextmanager

from minidist.common.wrapper import Wrapper


class Synchronized(Wrapper):
    """A wrapper that averages gradients over the ranks, unless `require_backward_grad_sync` is
    False in the forward pass. Scripts for torch's classes set it, or use `no_sync`."""

    require_backward_grad_sync = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward and backward passes within the block do not average: their gradients add up on
        each rank. The next pass outside averages the sums."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before
