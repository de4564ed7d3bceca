"""The processes themselves: start, feed, watch, and end all of them."""

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import cloudpickle

from minidist.runtime import forkserver, worker
from minidist.runtime.output import OrderedOutput
from minidist.runtime.report import Outcome
from minidist.runtime.stack import Stack

GRACE = 0.7  # seconds to end by oneself after the first failure; who has not, waits for the failed
ANSWER = 1.0  # seconds for a rank to say where it is
FAREWELL = 2.0  # seconds for a rank to leave when all is well


class Processes:
    """One process a rank, from the first breath to the last. Used by one thread at a time."""

    def __init__(self, environs: Sequence[dict[str, str]], stage: bytes) -> None:
        self._ranks: list[BaseProcess] = []
        self._calls: list[Connection] = []
        self._controls: list[Connection] = []
        outs: list[Connection] = []
        errs: list[Connection] = []
        self._running: set[int] = set()
        self._outcomes: dict[int, Outcome] = {}
        with _uninterrupted():
            self._folder = tempfile.mkdtemp(prefix="minidist-")
            # Should nobody end them: when this object goes, or the interpreter. multiprocessing's
            # finalizers run before it waits for children that live on, weakref's perhaps after.
            self._finalizer = Finalize(
                self, _kill, args=(self._ranks, self._folder), exitpriority=0
            )
        try:
            for environ in environs:
                calls, far_calls = Pipe()
                control, far_control = Pipe()
                out, far_out = Pipe(duplex=False)
                err, far_err = Pipe(duplex=False)
                self._calls.append(calls)
                self._controls.append(control)
                outs.append(out)
                errs.append(err)
                pipes = worker.Pipes(far_calls, far_control, far_out, far_err)
                with _uninterrupted():  # or a process could be there that nobody knows of
                    self._ranks.append(
                        forkserver.start(worker.main, pipes, environ, self._folder, stage)
                    )
                for end in (far_calls, far_control, far_out, far_err):
                    end.close()  # or the pipe would not end with the rank
        except BaseException:
            _kill(self._ranks, self._folder)
            raise
        finally:
            self._output = OrderedOutput(outs, errs)

    def first_outcomes(self) -> dict[int, Outcome]:
        """Wait until every rank has set its stage."""
        return self._collect(range(len(self._ranks)))

    def call(self, call: bytes, ranks: Sequence[int]) -> dict[int, Outcome]:
        """Send a pickled call to some ranks, and wait for how it ends on each."""
        for rank in ranks:
            try:
                self._calls[rank].send_bytes(call)
            except OSError:
                pass  # it died since the last call: _collect says so
        return self._collect(ranks)

    def whereabouts(self) -> list[Outcome]:
        """How the call in progress ended on each rank, or where it is."""
        for rank in self._running:
            self._ask(rank)
        deadline = time.monotonic() + ANSWER
        for rank in sorted(self._running):
            self._outcomes[rank] = Outcome(rank, stack=self._answer(rank, deadline))
        return [self._outcomes[rank] for rank in sorted(self._outcomes)]

    def dismiss(self) -> None:
        """Let the ranks leave in order; then end them."""
        try:
            for calls in self._calls:
                try:
                    calls.send_bytes(b"")
                except OSError:
                    pass
            leaving = [rank.sentinel for rank in self._ranks]
            deadline = time.monotonic() + FAREWELL
            while leaving and (left := deadline - time.monotonic()) > 0:
                for ready in wait([*leaving, *self._output.pipes()], left):
                    if isinstance(ready, Connection):
                        self._output.drain(ready)
                    elif isinstance(ready, int):
                        leaving.remove(ready)
        finally:
            self.end()

    def end(self) -> None:
        """End every rank, and all that it started, now."""
        self._finalizer()
        self._output.finish()
        for end in (*self._calls, *self._controls):
            end.close()

    def _collect(self, ranks: Sequence[int]) -> dict[int, Outcome]:
        """Watch the ranks, and show what they print, until each has an outcome."""
        self._outcomes = {}
        self._running = set(ranks)
        self._output.begin()
        calls = {self._calls[rank]: rank for rank in ranks}
        sentinels = {self._ranks[rank].sentinel: rank for rank in ranks}
        deadline: float | None = None
        while self._running:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            news = [end for end, rank in calls.items() if rank in self._running]
            ends = [end for end, rank in sentinels.items() if rank in self._running]
            ready = wait([*news, *ends, *self._output.pipes()], left)
            for end in ready:
                if isinstance(end, int):
                    if sentinels[end] in self._running:
                        self._bury(sentinels[end])
                elif isinstance(end, Connection):
                    if end in calls:
                        self._receive(calls[end])
                    else:
                        self._output.drain(end)
            self._output.done(self._running)
            if deadline is None and any(not o.returned for o in self._outcomes.values()):
                deadline = time.monotonic() + GRACE
            if deadline is not None and time.monotonic() >= deadline:
                self.whereabouts()
                self._running.clear()
                self._output.done(self._running)
        return dict(sorted(self._outcomes.items()))

    def _receive(self, rank: int) -> None:
        try:
            outcome = self._calls[rank].recv_bytes()
        except (EOFError, OSError):
            return self._bury(rank)
        try:
            value, failure, progress = cloudpickle.loads(outcome)
        except Exception as error:
            raise TypeError(f"a result cannot be rebuilt here: {error}") from error
        self._running.discard(rank)
        when = failure.when if failure else time.monotonic()
        self._outcomes[rank] = Outcome(
            rank, failure is None, value, failure, when=when, progress=progress
        )

    def _bury(self, rank: int) -> None:
        """A rank's process has ended, or is about to."""
        self._running.discard(rank)
        self._ranks[rank].join(ANSWER)
        exitcode = self._ranks[rank].exitcode
        self._outcomes[rank] = Outcome(
            rank, exitcode=0 if exitcode is None else exitcode, when=time.monotonic()
        )

    def _ask(self, rank: int) -> None:
        try:
            self._controls[rank].send_bytes(b"where are you?")
        except OSError:
            pass

    def _answer(self, rank: int, deadline: float) -> Stack | None:
        try:
            if self._controls[rank].poll(max(0.0, deadline - time.monotonic())):
                return cloudpickle.loads(self._controls[rank].recv_bytes())
        except (EOFError, OSError):
            pass
        return None


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put off a KeyboardInterrupt until the block is done."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is interrupted
        return
    late: list[Any] = []
    handler = signal.signal(signal.SIGINT, lambda *args: late.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if late:
            signal.raise_signal(signal.SIGINT)


@_uninterrupted()
def _kill(ranks: list[BaseProcess], folder: str) -> None:
    """End the ranks, and all that they started, in a session of each rank's own."""
    for rank in ranks:
        if rank.pid is not None:
            try:
                os.killpg(rank.pid, signal.SIGKILL)
            except ProcessLookupError:
                rank.kill()  # it has no session yet, or is gone
    for rank in ranks:
        rank.join()
        rank.close()
    ranks.clear()
    shutil.rmtree(folder, ignore_errors=True)
