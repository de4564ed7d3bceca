"""A million messages through words of shared memory, each checked: a litmus test of their order.

One rank writes a message and then publishes its number; the other waits until that is reached and
then reads the message (`backend.words`). A processor that orders memory weakly, such as ARM's, may
show the number before the message, if nothing forbids it. Then the message is *torn* (its checksum
is wrong) or *early* (it is the one before). Both counts must be 0, on every processor.
Lesson: collectives
"""

import mmap
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch.distributed as dist

import minidist as md
from minidist.backend.words import publish, reached
from minidist.bench import Row, draw, machine, show
from minidist.runtime import Pool

MESSAGES = 10**6
NBYTES = 1024  # of a message: its number, bytes that follow from that, a checksum
POSTED, TAKEN = 0, 8  # words, in lines of the cache of their own
SPIN = 200  # looks in vain after which a rank naps: it may hold the other's processor
NAP = 1e-5  # seconds
LIMIT = 30  # seconds that a rank waits for the other

FILLINGS = [bytes((31 * i + 7 * j) % 256 for j in range(NBYTES - 12)) for i in range(64)]


def run(rounds: int, picture: Path) -> list[Row]:
    """Count what is torn or early, of a million messages in all."""
    start = perf_counter()
    with md.ranks(2) as pool:
        seconds, torn, early = measure(pool, MESSAGES, rounds)
    row = Row("a message, and word that it has come", seconds)
    title = f"litmus: {MESSAGES:,} messages of {NBYTES} bytes between 2 ranks"
    show(title, [row])
    took = f"{perf_counter() - start:.1f} s"
    print(f"processor {machine()['processor']}: {torn} torn, {early} early (must be 0), {took}")
    draw(title, [row], picture)
    return [row]


def message(number: int) -> bytes:
    """(NBYTES,)"""
    text = number.to_bytes(8, "little") + FILLINGS[number % len(FILLINGS)]
    return text + zlib.crc32(text).to_bytes(4, "little")


def number_of(text: bytes) -> int | None:
    """The number of a message, None if it is torn."""
    if zlib.crc32(text[:-4]) != int.from_bytes(text[-4:], "little"):
        return None
    return int.from_bytes(text[:8], "little")


def data_first(words: memoryview, room: memoryview, number: int) -> None:
    """Send a message as the backend does."""
    room[:] = message(number)
    publish(words, POSTED, number)


Send = Callable[[memoryview, memoryview, int], None]


def measure(
    pool: Pool, messages: int, rounds: int, send: Send = data_first
) -> tuple[list[float], int, int]:
    """Seconds of a message in each round; how many of the messages were torn, and early. Others
    may compute meanwhile: it is counting that matters."""
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(2 * mmap.PAGESIZE)
        by_rank = pool(_here, file.name, messages, rounds, send)
    return by_rank[1]


def _here(path: str, messages: int, rounds: int, send: Send) -> tuple[list[float], int, int]:
    with open(path, "r+b") as file:
        shared = mmap.mmap(file.fileno(), 0)
    words = memoryview(shared)[: mmap.PAGESIZE].cast("q")
    room = memoryview(shared)[mmap.PAGESIZE :][:NBYTES]
    sends, seconds, torn, early = dist.get_rank() == 0, [], 0, 0
    for turn in range(rounds):
        numbers = range(1 + messages * turn // rounds, 1 + messages * (turn + 1) // rounds)
        start = perf_counter()
        for number in numbers:
            if sends:  # sends each when the one before has been read
                _until(words, TAKEN, number - 1)
                send(words, room, number)
            else:
                _until(words, POSTED, number)
                found = number_of(bytes(room))
                torn += found is None
                early += found is not None and found != number
                publish(words, TAKEN, number)
        seconds.append((perf_counter() - start) / len(numbers))
    return seconds, torn, early


def _until(words: memoryview, word: int, value: int) -> None:
    """Look until the word has this value. RuntimeError after LIMIT seconds."""
    tries, start = 0, 0.0
    while not reached([words], word, value):
        tries += 1
        if tries % SPIN == 0:
            start = start or perf_counter()
            if perf_counter() - start > LIMIT:
                raise RuntimeError(f"the other rank has not come for {LIMIT} s")
            time.sleep(NAP)
