"""The processes themselves: start, feed, watch, and end all of them."""

import os
import selectors
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import cloudpickle

from minidist.machine.runtime import forkserver, supervisor
from minidist.machine.runtime.output import OrderedOutput
from minidist.machine.runtime.report import UNKNOWN, Outcome
from minidist.machine.runtime.stack import Stack
from minidist.machine.runtime.system import enough_files, send_bytes, set_timeout, uninterrupted

GRACE = 0.7  # seconds that ranks have, after the first failure, to end their call by themselves
ANSWER = 1.0  # seconds for a rank to say where it is
CLOSING = 2.0  # seconds for a rank to end by itself
KILLING = 5.0  # seconds for the supervisor to kill the ranks


class Processes:
    """One process a rank, and their supervisor, from start to end. Used by one thread at a time,
    but for `now`, `pids` and `ended`.

    A rank that reads none of its call for `timeout` seconds counts as failed. Raises OSError if the
    system refuses a process or a pipe.
    """

    def __init__(
        self,
        environs: Sequence[dict[str, str]],
        stage: bytes,
        imports: Sequence[str],
        timeout: float,
    ) -> None:
        self._size, self._timeout = len(environs), timeout
        self._calls: list[Connection] = []
        self._controls: list[Connection] = []
        self._output = OrderedOutput()
        self._numbers = [0] * self._size  # of each rank's latest call; 0 enters the stage
        self._running: set[int] = set()
        self._outcomes: dict[int, Outcome] = {}
        self._exited: dict[int, int] = {}  # rank -> exit code
        self.pids: list[int] = []  # once all have entered their stage
        self._silent: set[int] = set()  # ranks from which no more outcome can come
        self._asking = threading.RLock()  # one thread at a time asks; its signal handlers too
        # Where events come from, and who handles them: no bound methods, with which a pool that
        # is forgotten would refer to itself, and stay.
        with enough_files(self._size):
            self._selector = selectors.DefaultSelector()
        self._end_supervisor: Callable[[], None] = lambda: None
        try:
            # An interrupt amid this could leave a process, or a pipe, that nobody knows of.
            with enough_files(self._size), uninterrupted():
                self._start(environs, stage, imports)
        except BaseException:
            self.end()
            raise

    def _start(
        self,
        environs: Sequence[dict[str, str]],
        stage: bytes,
        imports: Sequence[str],
    ) -> None:
        """Start the supervisor, and let it start the ranks."""
        self._line, theirs = Pipe()
        try:
            folder = os.path.join(forkserver.short_folder(), f"minidist-{uuid.uuid4().hex[:12]}")
            plan = supervisor.Plan(environs, folder, stage, imports, os.getpid())
            self._supervisor = forkserver.start(supervisor.main, theirs, plan)
        except BaseException:
            self._line.close()
            raise
        finally:
            theirs.close()
        # If nobody ends them: when this object goes, or the interpreter. multiprocessing's
        # finalizers run before it waits for children that live on, weakref's perhaps after.
        self._end_supervisor = Finalize(
            self, _end, args=(self._supervisor, self._line, folder), exitpriority=0
        )
        self._watch(self._line, Processes._note)
        for rank in range(self._size):
            pairs = Pipe(), Pipe(), Pipe(duplex=False), Pipe(duplex=False)
            calls, control, out, err = (ours for ours, _ in pairs)
            self._calls.append(calls)
            self._controls.append(control)
            self._output.add(out, err)
            supervisor.request_rank(self._line, [theirs for _, theirs in pairs])
            set_timeout(calls, self._timeout)
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
            self._numbers[rank] += 1
        for rank in ranks:
            try:
                send_bytes(self._calls[rank], call, self._timeout)
            except TimeoutError:  # it does not read
                self._settle(Outcome(rank, stuck="take its call"))
                break
            except OSError:
                pass  # it has died since the last call: the supervisor says so
        return self._collect()

    def whereabouts(self) -> list[Outcome]:
        """How the call in progress ended on each rank, or where it is."""
        for rank in sorted(self._running - self._silent):
            if self._calls[rank].poll():  # how it ended has been sent already
                self._receive(rank)
        for rank, stack in self._stacks().items():
            self._outcomes[rank] = Outcome(rank, stack=stack)
        return [self._outcomes[rank] for rank in sorted(self._outcomes)]

    def now(self) -> list[str]:
        """What each rank does."""
        stacks = self._stacks()
        return [
            Outcome(rank, stack=stacks[rank]).where if rank in stacks else "idle"
            for rank in range(self._size)
        ]

    @property
    def ended(self) -> bool:
        """Whether the ranks were ended: at the interpreter's exit, if nobody else did."""
        return self._line.closed

    def close(self) -> None:
        """Let each rank leave its stage and end; then end what is left."""
        try:
            for calls in self._calls:
                with suppress(OSError):
                    send_bytes(calls, b"", CLOSING)
            deadline = time.monotonic() + CLOSING
            while len(self._exited) < self._size and (left := deadline - time.monotonic()) > 0:
                self._handle_events(left)
        finally:
            self.end()

    def end(self) -> None:
        """Kill every rank, and all that it started, now."""
        # Not all of it is uninterrupted: who shows the output may keep us waiting.
        try:
            with uninterrupted():  # a Finalize that is interrupted is not called again
                self._end_supervisor()
            self._output.done(set())
        finally:
            # A Connection whose close was interrupted closes again later, when its file may be
            # another's.
            with uninterrupted(), self._asking:
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
        calls = self._calls[rank]
        try:
            message = calls.recv_bytes()
        except BaseException as error:  # what is left of a message cannot be read
            self._selector.unregister(calls)
            self._silent.add(rank)
            if isinstance(error, BlockingIOError):  # the timeout is over
                self._settle(Outcome(rank, stuck="send its whole result"))
            elif not isinstance(error, EOFError | OSError):  # it has ended, or does so now
                raise
            return
        try:
            number, value, failure, progress, edited = cloudpickle.loads(message)
        except Exception as error:
            raise TypeError(f"a result cannot be rebuilt here: {error}") from error
        if number == self._numbers[rank] and rank in self._running:
            when = failure.when if failure else time.monotonic()
            outcome = Outcome(rank, failure is None, value, failure, when=when)
            outcome.progress, outcome.edited = progress, edited
            self._settle(outcome)

    def _note(self) -> None:
        """The supervisor says which rank has ended, or that none can be started."""
        try:
            note = self._line.recv()
        except (EOFError, OSError):  # it has been killed, and the ranks with it
            self._selector.unregister(self._line)
            self._supervisor.join(ANSWER)
            if self._supervisor.exitcode == 1:  # by an exception
                raise RuntimeError(
                    "the ranks could not be started: why stands in the stderr of this program"
                ) from None
            self._exited = dict.fromkeys(range(self._size), UNKNOWN) | self._exited
            return
        if isinstance(note, Exception):
            with enough_files(self._size):
                raise note
        rank, exitcode = note
        self._exited[rank] = exitcode

    def _drain(self, pipe: Connection) -> None:
        if not self._output.drain(pipe):
            self._selector.unregister(pipe)

    def _stacks(self) -> dict[int, Stack | None]:
        """Where each rank is that runs a call; None if it gives no answer."""
        with self._asking:
            running = sorted(self._running)
            for rank in running:
                with suppress(EOFError, OSError):
                    while self._controls[rank].poll():  # an answer that came too late
                        self._controls[rank].recv_bytes()
                    send_bytes(self._controls[rank], b"where are you?", ANSWER)
            deadline = time.monotonic() + ANSWER
            return {rank: self._answer(rank, deadline) for rank in running}

    def _answer(self, rank: int, deadline: float) -> Stack | None:
        try:
            if self._controls[rank].poll(max(0.0, deadline - time.monotonic())):
                return cloudpickle.loads(self._controls[rank].recv_bytes())
        except (EOFError, OSError):
            pass
        return None


@uninterrupted()
def _end(process: BaseProcess, line: Connection, folder: str) -> None:
    """Let the supervisor kill what is left."""
    supervisor.hang_up(line)
    process.join(KILLING)
    process.kill()  # if it is stopped; the system ends its ranks
    process.join()
    process.close()
    line.close()
    shutil.rmtree(folder, ignore_errors=True)  # which the supervisor does, unless it was killed
