"""The nine collectives, as one calls them. Lesson: collectives."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.collectives.calls import run
from minidist.instruments.measure import TrafficCounter

Group = dist.ProcessGroup | None
Op = dist.ReduceOp | dist.ReduceOp.RedOpType
Rank = int | None
Tensors = Sequence[Tensor]
SUM = dist.ReduceOp.SUM


def broadcast(
    tensor: Tensor,
    src: Rank = None,
    group: Group = None,
    *,
    algorithm: str = "tree",
) -> None:
    """Copy `tensor` of rank `src` into `tensor` of every rank, in place. Lesson: collectives.

    algorithm: "flat", the root sends to one after another; "tree", who has it passes it on.
    """
    run("broadcast", group, tensor, root=src, algorithm=algorithm)


def reduce(
    tensor: Tensor,
    dst: Rank = None,
    op: Op = SUM,
    group: Group = None,
    *,
    algorithm: str = "tree",
) -> None:
    """Combine the ranks' `tensor` by `op` into `tensor` of rank `dst`, in place. On other ranks
    `tensor` keeps its values (torch leaves them open). Lesson: collectives.

    algorithm: "flat", the root takes from one after another; "tree", the broadcast's backwards.
    """
    run("reduce", group, tensor, root=dst, op=op, algorithm=algorithm)


def all_reduce(
    tensor: Tensor, op: Op = SUM, group: Group = None, *, algorithm: str = "ring"
) -> None:
    """Combine the ranks' `tensor` by `op` into `tensor` of every rank, in place.

    algorithm: "ring", the fewest bytes that are possible; "naive", rank 0 gathers, then sends to
    one after another; "tree", reduce to rank 0, then broadcast; "recursive_doubling", the fewest
    messages; "halving_doubling", as few bytes as the ring in fewer messages. Lesson: collectives.
    """
    run("all_reduce", group, tensor, op=op, algorithm=algorithm)


def scatter(
    tensor: Tensor,
    scatter_list: Tensors | None = None,
    src: Rank = None,
    group: Group = None,
) -> None:
    """Copy `scatter_list[i]` of rank `src` into `tensor` of the group's rank i. The root alone has
    the list. It is rank 0 unless `src` says otherwise. Lesson: collectives."""
    run("scatter", group, tensor, scatter_list, root=src)


def gather(
    tensor: Tensor,
    gather_list: Tensors | None = None,
    dst: Rank = None,
    group: Group = None,
) -> None:
    """Copy `tensor` of the group's rank i into `gather_list[i]` of rank `dst`. The root alone has
    the list. It is rank 0 unless `dst` says otherwise. Lesson: collectives."""
    run("gather", group, tensor, gather_list, root=dst)


def all_gather(tensor_list: Tensors, tensor: Tensor, group: Group = None) -> None:
    """Copy `tensor` of the group's rank i into `tensor_list[i]` of every rank, in a ring. Ranks may
    have tensors of other shapes, as `tensor_list` says. Lesson: collectives."""
    run("all_gather", group, tensor, tensor_list)


def reduce_scatter(output: Tensor, input_list: Tensors, op: Op = SUM, group: Group = None) -> None:
    """Combine the ranks' `input_list[i]` by `op` into `output` of the group's rank i, in a ring.
    The shapes within a list may differ; the lists of all ranks are alike. Lesson: collectives."""
    run("reduce_scatter", group, output, input_list, op=op)


def all_to_all(
    output_tensor_list: Tensors, input_tensor_list: Tensors, group: Group = None
) -> None:
    """Copy `input_tensor_list[j]` of rank i into `output_tensor_list[i]` of rank j, for all ranks i
    and j of the group. Every pair may have a shape of its own. Lesson: collectives."""
    run("all_to_all", group, output_tensor_list, input_tensor_list)


def barrier(group: Group = None) -> None:
    """Return only when every rank of the group has called it. Lesson: collectives."""
    run("barrier", group)


def sent_as_rings(calls: Mapping[str, tuple[int, int]]) -> int:
    """The bytes that this rank sends if these collectives of all ranks, such as the `calls` of a
    `TrafficCounter`, are rings: it runs them so, on as many bytes. Every rank
    calls this. ValueError for others than all_reduce, reduce_scatter, all_gather. Lesson: zero.
    """
    with TrafficCounter() as traffic:
        for operation, (_, nbytes) in calls.items():
            whole = torch.zeros(nbytes, dtype=torch.uint8)
            shards = list(whole.tensor_split(dist.get_world_size()))
            mine = shards[dist.get_rank()].clone()
            if operation == "all_reduce":
                all_reduce(whole, algorithm="ring")
            elif operation == "reduce_scatter":
                reduce_scatter(mine, shards)
            elif operation == "all_gather":
                all_gather(shards, mine)
            else:
                raise ValueError(f"{operation} is no ring of all_reduce's halves")
    return traffic.sent_bytes
