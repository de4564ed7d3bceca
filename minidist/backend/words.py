"""Words of shared memory: how a rank sees what another one has done.

A rank writes data, and then a word that announces it. Another rank reads the word, and then the
data. Nobody may see the word before the data.

x86 ensures that by itself: stores become visible in the order of the program, and loads are done in
that order (Intel's manual, volume 3, "Memory Ordering"; only a load may overtake an earlier store).
ARM, POWER and RISC-V do not. There `publish` puts a fence between the data and the word, and
`reached` puts one between the word and the data.

The fence is a lock that is taken and given back twice. Giving it back is a release: what comes
before it in the program is visible before it. Taking it is an acquire: what comes after it in the
program happens after it. And an acquire never overtakes an earlier release (ARM's manual DDI 0487,
"Barrier-ordered-before"; RISC-V's RVWMO, rule 7; POWER's release is a full lwsync). So what comes
before the first release stays before the second acquire, and so before what comes after the fence.
One pair would not do: what comes before and what comes after may both move into it, and meet there.

A word has 8 bytes, is aligned, and Python moves it at once, so nobody sees half of it.
`python -m minidist bench litmus` sends a million messages and counts those that came too early.

One thing is left open: a rank that has just published may still read an old `EXPECTED` (in `bell`)
of a rank that falls asleep. Then its ring is lost, and the other wakes by itself: mostly
within 10 ms, at most a second later.
"""

import platform
import threading
from collections.abc import Iterable

ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686", "s390x")

_lock = threading.Lock()


def fence() -> None:
    """Keep what comes before in the program before what comes after it, as other ranks see it."""
    if not ORDERED:
        for _ in range(2):
            with _lock:
                pass


def publish(words: memoryview, at: int, value: int) -> None:
    """Write a word that announces data."""
    fence()
    words[at] = value


def reached(words: Iterable[memoryview], at: int, value: int) -> bool:
    """Whether this word of all of them is `value` or more. Then what they announce is there."""
    for each in words:
        if each[at] < value:
            return False
    fence()
    return True
