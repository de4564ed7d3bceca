"""The ranks' output: live, prefixed, and in the same order at every run.

Ranks run at the same time, so their lines would mix differently at each run. Here the first rank's
output appears as it comes; that of the next one is held back until the first is done with the call,
and so on. Of a line that a progress bar draws over and over, a rank that was held back shows only
the last state. So the text at the end is always the same, which is what lets nbval compare it.

Amid its text a rank can `tell` two things more: a picture, and a question to the reader.
"""

import base64
import codecs
import json
import os
import re
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection

# The start of each line that has text: after a newline, or after the carriage return of a
# progress bar that is drawn over.
MOST = 1 << 23  # characters of a stream that wait for their turn
_LINE_START = re.compile(r"(?<=[\r\n])(?=[^\r\n])")

# Unicode keeps these characters for such use: no text has them.
START, PICTURE, QUESTION = "\ufdd0", "\ufdd1", "\ufdd2"
_MESSAGE = re.compile(f"{START}([^{START}\n]*)([{PICTURE}{QUESTION}])\n")


def tell(kind: str, content: str) -> None:
    """In a rank: send a PICTURE (a PNG in base64) or a QUESTION (JSON of where the answer goes, and
    the prompt) amid what it prints."""
    assert sys.__stdout__ is not None
    sys.stdout.flush()
    sys.__stdout__.write(f"{START}{content}{kind}\n")
    sys.__stdout__.flush()


def _last_state(line: str) -> str:
    """Of a line that a progress bar draws over and over."""
    drawn = line.rstrip("\r")
    _, start, last = drawn.rpartition("\r")
    return start + last + line[len(drawn) :]


class Stream:
    """One pipe of one rank: its stdout, or its stderr."""

    def __init__(self, pipe: Connection, name: str, prefix: str) -> None:
        self.pipe, self.name, self.prefix = pipe, name, prefix
        self.held = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._last = "\n"  # the last character shown
        os.set_blocking(pipe.fileno(), False)

    @property
    def asks(self) -> bool:
        """Whether there is a question in what is held."""
        return QUESTION in self.held

    def drain(self) -> bool:
        """Take what lies in the pipe; False once its writer is gone."""
        try:
            data = os.read(self.pipe.fileno(), 1 << 20)  # more than a pipe holds
        except BlockingIOError:
            return True
        self.held += self._decoder.decode(data)
        if len(self.held) > MOST:
            self.held = f"(left out: all but {MOST // 2:,} characters)\n{self.held[-MOST // 2 :]}"
        return bool(data)

    def show(self, *, every: bool, ended: bool) -> None:
        """Write what was held: `every` character, or lines once they are whole. At the end of a
        call, end the last line too."""
        text = self.held
        if ended:
            text += self._decoder.decode(b"", final=True)
        if not every and "\r" in text:
            text = "\n".join(map(_last_state, text.split("\n")))
        whole = text.rfind("\n") + 1
        if ended or (every and START not in text[whole:]):
            whole = len(text)
        self.held = text[whole:]
        pieces = iter(_MESSAGE.split(text[:whole]))
        self._write(next(pieces))
        for content, kind, more in zip(pieces, pieces, pieces, strict=True):
            self._end_line()
            (self._draw if kind == PICTURE else self._ask)(content)
            self._write(more)
        if ended:
            self._end_line()

    def _write(self, text: str) -> None:
        text = re.sub(f"{START}.*", "", text)  # what is left of a message
        if text:
            stream = getattr(sys, self.name)
            stream.write(_LINE_START.sub(self.prefix, self._last + text)[1:])
            stream.flush()
            self._last = text[-1]

    def _end_line(self) -> None:
        if self._last != "\n":
            self._write("\n")

    def _draw(self, content: str) -> None:
        ipython = sys.modules.get("IPython")
        if ipython is None or ipython.get_ipython() is None:
            self._write("(a figure, which a notebook would show)\n")
            return
        from IPython.display import Image, display

        print(self.prefix.rstrip(), flush=True)
        words = f"A figure that {self.prefix.strip(' []')} has drawn."
        display(Image(base64.b64decode(content), alt=words))

    def _ask(self, content: str) -> None:
        path, prompt = json.loads(content)
        with suppress(OSError):  # the rank may have ended, or end meanwhile
            pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(pipe, True)  # or a long answer would be cut off
            with open(pipe, "w", encoding="utf-8") as answer:
                answer.write(input(self.prefix + prompt) + "\n")


class OrderedOutput:
    """The streams of all ranks, of which one rank at a time is live."""

    def __init__(self) -> None:
        self._streams: list[list[Stream]] = []
        self._open: dict[Connection, Stream] = {}
        self._live = 0
        self._first: int | None = None  # the first rank that was live in this call
        self.answered = 0.0  # time.monotonic() of the reader's last answer in it

    def add(self, out: Connection, err: Connection) -> None:
        """The pipes of one more rank."""
        prefix = f"[rank {len(self._streams)}] "
        self._streams.append([Stream(out, "stdout", prefix), Stream(err, "stderr", prefix)])
        self._open |= {stream.pipe: stream for stream in self._streams[-1]}

    def begin(self) -> None:
        """A call starts."""
        self._live, self._first, self.answered = 0, None, 0.0

    def drain(self, pipe: Connection) -> bool:
        """Take what one pipe holds, and show it if its rank is live. False once it has ended."""
        if stream := self._open.get(pipe):
            if not stream.drain():
                del self._open[pipe]
            if stream.asks:  # who waits for an answer cannot wait for another rank's end
                stream.show(every=False, ended=False)
                self.answered = time.monotonic()
        self._show_live()
        return pipe in self._open

    def done(self, running: set[int]) -> None:
        """Show, in order, the ranks that have nothing more to say in this call."""
        while self._live < len(self._streams) and self._live not in running:
            for stream in self._streams[self._live]:
                if stream.pipe in self._open:
                    self.drain(stream.pipe)
                stream.show(every=self._live == self._first, ended=True)
            self._live += 1
        if self._first is None:
            self._first = self._live
        self._show_live()

    def _show_live(self) -> None:
        if self._live < len(self._streams):
            for stream in self._streams[self._live]:
                stream.show(every=self._live == self._first, ended=False)

    def close(self) -> None:
        """Close the pipes."""
        for streams in self._streams:
            for stream in streams:
                stream.pipe.close()
        self._open.clear()
