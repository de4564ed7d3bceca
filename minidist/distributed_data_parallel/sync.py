"""Whether and how a wrapper averages (lesson 4): the same for whole and for sharded gradients."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from minidist.common.wrapper import Wrapper
from minidist.distributed_data_parallel.reducer import CommHook, Reducer


class Synchronized(Wrapper):
    """A wrapper whose `_reducer` averages gradients, if `require_backward_grad_sync` is set at the
    forward pass."""

    require_backward_grad_sync = True
    _reducer: Reducer

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do not average after the forward passes within the block: their gradients add up on each
        rank. The backward pass of the next forward pass outside averages the sums."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let `hook(state, bucket)` average the buckets, instead of the library's own collective.
        As in torch it returns a Future of the average, of shape (n,), and divides by the world size
        itself."""
        if self._reducer.comm_hook is not None:
            raise RuntimeError("a communication hook is registered already")
        if not callable(hook):
            raise TypeError(f"a communication hook is a function, not {type(hook).__name__}")
        self._reducer.comm_hook = hook, state
