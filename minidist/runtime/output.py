"""The ranks' output: live, prefixed, and in the same order at every run.

Ranks run at the same time, so their lines would mix differently at each run. Here rank 0's lines
appear as they come; those of rank 1 are held back until rank 0 is done with the call, and so on.
What is shown at the end is always the same text, which is what lets nbval compare it.
"""

import codecs
import os
import re
import sys
from multiprocessing.connection import Connection

# The start of each line that has text: after a newline, or after the carriage return of a
# progress bar that is drawn over.
_LINE_START = re.compile(r"(?<=[\r\n])(?=[^\r\n])")


# How many characters of a stream are held back at most: a rank that prints without end, while
# another one is live, must not fill the memory.
LIMIT = 1 << 23


class Stream:
    """One pipe of one rank: its stdout, or its stderr."""

    def __init__(self, pipe: Connection, name: str, prefix: str) -> None:
        self.pipe, self.name, self.prefix = pipe, name, prefix
        self.held: list[str] = []
        self._size = 0  # characters in it
        self._dropped = 0  # and what came when it was full
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._last = "\n"  # the last character shown
        os.set_blocking(pipe.fileno(), False)

    def drain(self) -> bool:
        """Take what lies in the pipe; False once its writer is gone."""
        for _ in range(16):  # 1 MB, more than a pipe holds; a writer without end must not keep us
            try:
                data = os.read(self.pipe.fileno(), 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            text = self._decoder.decode(data)
            if self._size + len(text) > LIMIT:
                self._dropped += len(text)
            else:
                self.held.append(text)
                self._size += len(text)
        return True

    def show(self, *, ended: bool) -> None:
        """Write what was held; at the end of a call, end the last line too."""
        if ended:
            self.held.append(self._decoder.decode(b"", final=True))
        if self._dropped:
            self.held.append(f"\n... {self._dropped} more characters, too many to hold back ...\n")
        text = "".join(self.held)
        self.held.clear()
        self._size = self._dropped = 0
        if text:
            shown = _LINE_START.sub(self.prefix, self._last + text)[1:]
            self._write(shown)
            self._last = text[-1]
        if ended and self._last != "\n":
            self._write("\n")
            self._last = "\n"

    def _write(self, text: str) -> None:
        stream = getattr(sys, self.name)
        if stream is None:  # the program was started without one
            return
        try:
            stream.write(text)
        except UnicodeEncodeError as error:  # as it shows its own stderr
            stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        stream.flush()


class OrderedOutput:
    """The streams of all ranks, of which one rank at a time is live."""

    def __init__(self) -> None:
        self._streams: list[list[Stream]] = []
        self._open: dict[Connection, Stream] = {}
        self._live = 0

    def add(self, out: Connection, err: Connection) -> None:
        """The pipes of one more rank."""
        prefix = f"[rank {len(self._streams)}] "
        self._streams.append([Stream(out, "stdout", prefix), Stream(err, "stderr", prefix)])
        self._open |= {stream.pipe: stream for stream in self._streams[-1]}

    def begin(self) -> None:
        """A call starts: rank 0 is live again."""
        self._live = 0

    def drain(self, pipe: Connection) -> bool:
        """Take what one pipe holds, and show it if its rank is live. False once it has ended."""
        if pipe in self._open and not self._open[pipe].drain():
            del self._open[pipe]
        self._show_live()
        return pipe in self._open

    def done(self, running: set[int]) -> None:
        """Show, in order, the ranks that have nothing more to say in this call."""
        while self._live < len(self._streams) and self._live not in running:
            for stream in self._streams[self._live]:
                if stream.pipe in self._open:
                    self.drain(stream.pipe)
                stream.show(ended=True)
            self._live += 1
        self._show_live()

    def _show_live(self) -> None:
        if self._live < len(self._streams):
            for stream in self._streams[self._live]:
                stream.show(ended=False)

    def close(self) -> None:
        """Close the pipes."""
        for streams in self._streams:
            for stream in streams:
                stream.pipe.close()
        self._open.clear()
