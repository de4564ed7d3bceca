"""The puzzles and the exercise of the lesson communication."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from minidist.course.checks.verdict import NotYet, check, function, hints, number, on_ranks, ranks
from minidist.instruments.measure import TrafficCounter


@check
@hints(
    "The formula is the first of the lesson, t = α + nβ. An empty message has n = 0.",
    "Let α + nβ be twice α, and solve for n.",
    "The bytes must take as long as α. Multiply α, in seconds, by the bandwidth, in bytes a"
    " second.",
)
def twice_an_empty_one(answer: object) -> str:
    """Bytes of the message that takes 2α, where α is 10 µs and 1/β is 25 GB/s."""
    number(
        answer,
        250_000,
        "bytes",
        {
            500_000: "such a message takes 3α",
            250: "give bytes",
            0.25: "give bytes",
            2.5e11: "α is 10 microseconds, not 10 seconds",
        },
    )
    return "α/β. Shorter messages mostly pay for α, longer ones for their bytes."


@check
@hints(
    "The paragraph above the puzzle has both: the algorithm bandwidth, and the bus "
    "bandwidth made from it.",
    "First the algorithm bandwidth: GB divided by seconds.",
    "Multiply that by what a rank of a ring sends of each byte, 2(N − 1)/N for an all_reduce.",
)
def bus_bandwidth(answer: object) -> str:
    """GB/s, of an all_reduce of 1 GB on 8 GPUs in 5 ms."""
    number(
        answer,
        350,
        "GB/s",
        {
            200: "that is the algorithm bandwidth, which counts each byte of the vector once",
            175: "a rank sends 2 (N - 1)/N of the vector, not (N - 1)/N",
            400: "a rank sends 2 (N - 1)/N of the vector, not twice all of it",
            1600: "that is 200 GB/s for each GPU together; count what one rank sends",
            350e9: "give GB/s",
        },
    )
    return "1 GB / 5 ms × 2 × 7/8. Compare it with what a link can carry."


@check
@hints(
    'It is described under "Five ways to all_reduce", with a picture. `recursive_doubling` '
    "below it shows how two partners exchange tensors.",
    "On the way down partners keep one half each, of the piece that they still have, and "
    "send the other. Add what arrives to yours, and go on with it, at half the distance.",
    "On the way back take the steps in reverse: send your finished piece, and receive the "
    "partner's into the half you gave away. Use views of x, then all lies in its place.",
)
def halving_doubling(answer: object) -> str:
    """The sum in x on every rank: 2 lg N messages of a rank, 2 (N - 1)/N of the vector in them."""
    all_reduce = function(answer)
    for world_size in (1, 2, 4, 8):
        for n in (8, 1024):
            results = on_ranks(
                _trial, all_reduce, n, world_size=world_size, where=" over gloo", backend="gloo"
            )
            _judge(results, world_size, n)
    return "on 1, 2, 4 and 8 ranks, with 2 lg N messages and the bytes of a ring."


def _judge(results: list[tuple[str, int, int]], world_size: int, n: int) -> None:
    on = f"on {ranks(world_size)}"
    for rank, (wrong, _, _) in enumerate(results):
        if wrong:
            raise NotYet(f"{on}, rank {rank} {wrong}.")
    messages, nbytes = (max(counted) for counted in list(zip(*results, strict=True))[1:])
    steps, fewest = 2 * (world_size.bit_length() - 1), 2 * (world_size - 1) * n * 8 // world_size
    if world_size > 1 and not messages:
        raise NotYet("the sum is right, but not by messages: use send, isend and recv.")
    if messages > steps:
        raise NotYet(f"the sum is right, but {on} a rank sends {messages} messages, not {steps}.")
    if nbytes > fewest:
        share = nbytes / (n * 8)
        raise NotYet(
            f"the sum is right, but {on} a rank sends {share:g} times the vector, "
            f"not {fewest / (n * 8):g} times."
        )
    if nbytes < fewest:  # no rank can do with less
        raise NotYet(
            f"the sum is right, but {on} a part of it did not go by messages: "
            "use send, isend and recv all the way."
        )


def _trial(all_reduce: Callable[..., Any], n: int) -> tuple[str, int, int]:
    """What is wrong on this rank, if anything; its messages, and their bytes."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ones = torch.arange(1, n + 1, dtype=torch.float64)
    x = ones * 10**rank
    wanted = ones * sum(10**other for other in range(world_size))
    with TrafficCounter() as traffic:
        result = all_reduce(x)
    if torch.equal(x, wanted) and traffic.control_messages:
        return "has the sum, but by md.collectives: use send, isend and recv yourself", 0, 0
    if torch.equal(x, wanted):
        return "", traffic.sent_messages, traffic.sent_bytes
    if isinstance(result, torch.Tensor) and torch.equal(result, wanted):
        return "returns the sum, but x does not hold it", 0, 0
    right = int((x == wanted).sum()) if x.shape == wanted.shape else 0
    return f"has the sum in {right} of {n} elements", 0, 0
