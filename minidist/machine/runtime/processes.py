"""The processes themselves: start, feed, watch, and end all of them."""

import os
import selectors
import shutil
import signal
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

import cloudpickle

from minidist.machine.runtime import forkserver, supervisor
from minidist.machine.runtime.output import OrderedOutput
from minidist.machine.runtime.report import Outcome

GRACE = 0.7  # seconds that ranks have, after the first failure, to end their call by themselves
ANSWER = 1.0  # seconds for a rank to say where it is
CLOSING = 2.0  # seconds for a rank to end by itself
KILLING = 5.0  # seconds for the supervisor to kill the ranks


class Processes:
    """One process a rank, and their supervisor, from start to end. Used by one thread at a time.

    Raises OSError if the system refuses a process or a pipe.
    """

    def __init__(
        self, environs: Sequence[dict[str, str]], stage: bytes, imports: Sequence[str]
    ) -> None:
        self._size = len(environs)
        self._calls: list[Connection] = []
        self._controls: list[Connection] = []
        self._output = OrderedOutput()
        self._running: set[int] = set()
        self._outcomes: dict[int, Outcome] = {}
        self._exited: dict[int, int] = {}  # rank -> exit code
        self._silent: set[int] = set()  # ranks from which no more outcome can come
        self.pids: list[int] = []  # once all have entered their stage
        # Where events come from, and who handles them: no bound methods, with which a pool that
        # is forgotten would refer to itself, and stay.
        self._selector = selectors.DefaultSelector()
        self._end_supervisor: Callable[[], Any] = lambda: None
        try:
            # An interrupt amid this could leave a process, or a pipe, that nobody knows of.
            with uninterrupted():
                self._start(environs, stage, imports)
        except BaseException:
            self.end()
            raise

    def _start(
        self, environs: Sequence[dict[str, str]], stage: bytes, imports: Sequence[str]
    ) -> None:
        """Start the supervisor, and let it start the ranks."""
        folder = os.path.join(tempfile.gettempdir(), f"minidist-{uuid.uuid4().hex[:12]}")
        plan = supervisor.Plan(environs, folder, stage, imports)
        self._line = forkserver.start(supervisor.main, plan)
        # If nobody ends them: when this object goes, or the interpreter.
        self._end_supervisor = weakref.finalize(self, _end, self._line, folder)
        self._watch(self._line, Processes._note)
        for rank in range(self._size):
            pairs = Pipe(), Pipe(), Pipe(duplex=False), Pipe(duplex=False)
            calls, control, out, err = (ours for ours, _ in pairs)
            self._calls.append(calls)
            self._controls.append(control)
            self._output.add(out, err)
            supervisor.request_rank(self._line, [theirs for _, theirs in pairs])
            self._watch(calls, Processes._receive, rank)
            self._watch(out, Processes._drain, out)
            self._watch(err, Processes._drain, err)

    def _watch(self, end: Connection, *handler: Any) -> None:
        self._selector.register(end, selectors.EVENT_READ, handler)

    def first_outcomes(self) -> dict[int, Outcome]:
        """Wait until every rank has entered its stage. The values are their pids."""
        self._begin(range(self._size))
        outcomes = self._collect()
        if all(outcome.returned for outcome in outcomes.values()):
            self.pids = [outcome.value for outcome in outcomes.values()]
        return outcomes

    def call(self, call: bytes, ranks: Sequence[int]) -> dict[int, Outcome]:
        """Send a pickled call to some ranks, and wait for how it ends on each."""
        self._begin(ranks)
        for rank in ranks:
            with suppress(OSError):  # it has died since the last call: the supervisor says so
                self._calls[rank].send_bytes(call)
        return self._collect()

    def whereabouts(self) -> list[Outcome]:
        """How the call in progress ended on each rank, or where it is."""
        for rank in sorted(self._running - self._silent):
            if self._calls[rank].poll():  # how it ended has been sent already
                self._receive(rank)
        running = sorted(self._running)
        for rank in running:
            with suppress(OSError):
                self._controls[rank].send_bytes(b"where are you?")
        deadline = time.monotonic() + ANSWER
        for rank in running:
            stack, control = None, self._controls[rank]
            with suppress(EOFError, OSError):
                if control.poll(max(0.0, deadline - time.monotonic())):
                    stack = cloudpickle.loads(control.recv_bytes())
            self._outcomes[rank] = Outcome(rank, stack=stack)
        return [self._outcomes[rank] for rank in sorted(self._outcomes)]

    @property
    def ended(self) -> bool:
        """Whether the ranks were ended; in a forked process they always were."""
        return self._line.closed

    def close(self) -> None:
        """Let each rank leave its stage and end; then end what is left."""
        try:
            for calls in self._calls:
                with suppress(OSError):
                    calls.send_bytes(b"")
            deadline = time.monotonic() + CLOSING
            with suppress(RuntimeError):  # the supervisor is gone
                while len(self._exited) < self._size and (left := deadline - time.monotonic()) > 0:
                    self._handle_events(left)
        finally:
            self.end()

    def end(self) -> None:
        """Kill every rank, and all that it started, now."""
        with uninterrupted():
            try:
                self._end_supervisor()
                self._output.done(set())
            finally:
                self._selector.close()
                self._output.close()
                for end in (*self._calls, *self._controls):
                    end.close()

    def _begin(self, ranks: Sequence[int]) -> None:
        self._outcomes = {}
        self._running = set(ranks)
        self._output.begin()

    def _collect(self) -> dict[int, Outcome]:
        """Watch the ranks, and show what they print, until each has an outcome."""
        deadline: float | None = None
        while self._running:
            for rank in self._running & self._exited.keys():
                if rank in self._silent or not self._calls[rank].poll():
                    self._settle(Outcome(rank, exitcode=self._exited[rank], when=time.monotonic()))
            self._output.done(self._running)
            if deadline is None and any(not o.returned for o in self._outcomes.values()):
                deadline = time.monotonic() + GRACE
            left = None
            if deadline is not None:  # a rank whose reader asks it for more has as long again
                left = max(deadline, self._output.answered + GRACE) - time.monotonic()
            if left is not None and left <= 0:
                self.whereabouts()
                self._running.clear()
            elif self._running:
                self._handle_events(left)
        self._output.done(self._running)
        return dict(sorted(self._outcomes.items()))

    def _settle(self, outcome: Outcome) -> None:
        self._running.discard(outcome.rank)
        self._outcomes[outcome.rank] = outcome

    # ---- what happens --------------------------------------------------------------------------

    def _handle_events(self, seconds: float | None) -> None:
        """Wait until something happens, or so long."""
        for key, _ in self._selector.select(seconds):
            handler, *args = key.data
            handler(self, *args)

    def _receive(self, rank: int) -> None:
        """A rank sends how its call has ended."""
        try:
            message = self._calls[rank].recv_bytes()
        except BaseException as error:  # it ends now; or an interrupt, of which a part is read
            self._selector.unregister(self._calls[rank])
            self._silent.add(rank)
            if isinstance(error, EOFError | OSError):
                return
            raise
        try:
            value, failure, progress = cloudpickle.loads(message)
        except Exception as error:
            raise TypeError(f"a result cannot be rebuilt here: {error}") from error
        when = failure.when if failure else time.monotonic()
        self._settle(Outcome(rank, failure is None, value, failure, when=when, progress=progress))

    def _note(self) -> None:
        """The supervisor says which rank has ended, or that none can be started."""
        try:
            note = self._line.recv()
        except (EOFError, OSError):
            self._selector.unregister(self._line)
            raise RuntimeError(
                "the process that supervises the ranks has ended. If by an error, it stands in the "
                "stderr of this program"
            ) from None
        if isinstance(note, Exception):
            raise note
        rank, exitcode = note
        self._exited[rank] = exitcode

    def _drain(self, pipe: Connection) -> None:
        if not self._output.drain(pipe):
            self._selector.unregister(pipe)


def _end(line: Connection, folder: str) -> None:
    """Let the supervisor kill what is left."""
    if not line.closed:  # as it is in a forked process
        supervisor.hang_up(line, KILLING)
        line.close()
        shutil.rmtree(folder, ignore_errors=True)  # which the supervisor does, unless it was killed


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off a KeyboardInterrupt until the block is done."""
    handler = signal.getsignal(signal.SIGINT)
    # Only the main thread is interrupted; a handler in C, which is None here, raises nothing.
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    late: list[Any] = []
    signal.signal(signal.SIGINT, lambda *signal_and_frame: late.append(signal_and_frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if late:
            handler(*late[0])
