"""The puzzles and the exercise of the lesson networks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from minidist.course.checks.verdict import (
    NotYet,
    check,
    function,
    puzzle,
    require_right,
    shown,
)
from minidist.instruments.link import Link
from minidist.rank import Place

NUMEL = 10_000  # of a vector: 80 kB, so that an agreement of md.collectives is small beside it


@check
def flat_rings(answer: object) -> None:
    """Whether 16 GPUs can have all_reduced 8.59 GB by flat rings, in 47.5 ms."""
    letter = shown(answer).strip(" .'").upper()
    if letter not in ("A", "B", "C"):
        raise NotYet(f'give one letter, "A", "B" or "C", not {shown(answer)}.')
    if letter == "A":
        raise NotYet("NVLink lies within a node. What goes to the other one takes the cards.")
    if letter == "C":
        raise NotYet("what flat rings send out of a node can be counted, and so can its time.")


tokens = puzzle(__name__, "tokens")


@check
def hierarchical_all_gather(answer: object) -> None:
    """The x of all ranks, in their order; each goes to each other node once."""
    for nodes, local in (2, 2), (2, 3), (3, 2):
        results = require_right(
            _trial,
            function(answer),
            nodes,
            world_size=nodes * local,
            where=f", on {nodes} nodes",
            nodes=nodes,
            link=Link(gbps=1000),
        )
        wanted, sent = local * (nodes - 1), max(vectors for _, vectors in results)
        if sent > wanted + 0.2:
            raise NotYet(
                f"the result is right, but on {nodes} nodes of {local} ranks {sent:.1f} vectors "
                f"leave a node, not {wanted}."
            )


def _trial(all_gather: Callable[..., Any], nodes: int) -> tuple[str, float]:
    """What is wrong on this rank, if anything; the vectors that leave its node."""
    place, local = Place.here(), dist.get_world_size() // nodes
    names = ("across", "within")
    mesh = dist.init_device_mesh("cpu", (nodes, local), mesh_dim_names=names)
    vectors = torch.arange(dist.get_world_size() * NUMEL, dtype=torch.float64).split(NUMEL)
    dist.barrier()
    before = Link.sent_by_node(place.node_rank)
    got = all_gather(
        vectors[place.rank].clone(), mesh.get_group("within"), mesh.get_group("across")
    )
    dist.barrier()
    left = (Link.sent_by_node(place.node_rank) - before) / vectors[0].nbytes
    return _wrong(got, vectors, nodes), left


def _wrong(got: Any, vectors: tuple[torch.Tensor, ...], nodes: int) -> str:
    if not isinstance(got, torch.Tensor):
        return f"returns {shown(got)}, not a tensor"
    whole = torch.cat(vectors)
    if got.shape != whole.shape:
        return f"returns a tensor of shape {tuple(got.shape)}, not {tuple(whole.shape)}"
    if torch.equal(got, whole):
        return ""
    by_column = whole.view(nodes, -1, NUMEL).transpose(0, 1).flatten()
    if torch.equal(got, by_column):
        return "has all vectors, but those of equal local ranks stand side by side"
    pairs = zip(got.split(NUMEL), vectors, strict=True)
    place = [torch.equal(*pair) for pair in pairs].index(False)
    return f"has something else where the vector of rank {place} belongs"
