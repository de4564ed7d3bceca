"""Answers to the puzzles and the exercise of the lesson long_sequences."""

import torch
import torch.distributed as dist

import minidist as md
from minidist.course.checks import long_sequences as check


def here():
    return dist.get_rank(), dist.get_world_size()


def shifted(tensors, source, positions, by=1):
    """As the lesson's `to_the_right`; by=-1: to the left."""
    rank, size = here()
    received = []
    for x in tensors:
        request = dist.isend(x.contiguous(), (rank + by) % size)
        y = x.new_empty(*x.shape[:2], len(positions[source]), x.shape[3])
        dist.recv(y, (rank - by) % size)
        request.wait()
        received.append(y)
    return received


def block(q, k, v, lse, dout, own, positions, source, scale=None):
    """What this rank's queries add to dq, and to the gradients of rank `source`'s k and v."""
    rank, scale = dist.get_rank(), q.shape[-1] ** -0.5 if scale is None else scale
    scores = q @ k.mT * q.shape[-1] ** -0.5
    unseen = positions[rank][:, None] < positions[source]
    weights = (scores.masked_fill(unseen, -torch.inf) - lse[..., None]).exp()
    dscores = weights * (dout @ v.mT - own) * scale
    return dscores @ k, dscores.mT @ q, weights.mT @ dout


def ring(begin=1, add_own=True, home=1, keys_again=False, by=1, scale=None, way=lambda r: r):
    """Gradients begin at the right neighbour (begin=1), or at their own rank (begin=0)."""

    def ring_backward(q, k, v, out, lse, dout, positions):
        rank, size = here()
        row = (dout * out).sum(-1, keepdim=True)
        dq, dk, dv = block(q, k, v, lse, dout, row, positions, rank, scale)
        kv, travels = [k, v], [dk, dv] if begin == 0 else None
        for step in range(1, size):
            source = (rank - by * step) % size
            kv = shifted(kv, source, positions, by)
            more, *parts = block(q, *kv, lse, dout, row, positions, source, scale)
            dq = dq + more
            if travels:
                travels = shifted(travels, source, positions, by)
                parts = [a + b for a, b in zip(travels, parts, strict=True)]
            travels = parts
        if keys_again:
            shifted(kv, rank, positions, by)
        if home:
            travels = shifted(travels, rank, positions, by * home)
        if begin == 1:
            travels = [a + add_own * b for a, b in zip(travels, (dk, dv), strict=True)]
        return way((dq, *travels))

    return ring_backward


right = ring()
leftwards = ring(by=-1)
n_hops = ring(begin=0)
stays_at_the_left_neighbour = ring(begin=0, home=0)
comes_home_the_other_way = ring(home=-1)  # of two ranks the right one
own_part_forgotten = ring(add_own=False)
keys_come_home = ring(keys_again=True)
without_the_scale = ring(scale=1)
two_of_them = ring(way=lambda r: r[1:])


def one_message(q, k, v, out, lse, dout, positions):
    """Keys and values in one tensor, gradients in another; both under way at once."""
    rank, size = here()
    row, kv = (dout * out).sum(-1, keepdim=True), torch.stack([k, v])
    dq, *own = block(q, k, v, lse, dout, row, positions, rank)
    passed = None
    for step in range(1, size):
        source = (rank - step) % size
        arriving = kv.new_empty(*kv.shape[:3], len(positions[source]), kv.shape[4])
        operations = [dist.P2POp(dist.isend, kv, (rank + 1) % size)]
        operations += [dist.P2POp(dist.irecv, arriving, (rank - 1) % size)]
        if passed is not None:
            following = torch.empty_like(arriving)
            operations += [dist.P2POp(dist.isend, passed, (rank + 1) % size)]
            operations += [dist.P2POp(dist.irecv, following, (rank - 1) % size)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        kv = arriving
        more, *parts = block(q, *kv, lse, dout, row, positions, source)
        dq, parts = dq + more, torch.stack(parts)
        passed = parts if passed is None else parts + following
    dk, dv = shifted(passed, rank, positions)
    return dq, own[0] + dk, own[1] + dv


def padded(x, length):
    return torch.cat([x, x.new_zeros(*x.shape[:2], length - x.shape[2], x.shape[3])], 2)


def with_collectives(total_by):
    """Keys and values are gathered, gradients reduced."""

    def ring_backward(q, k, v, out, lse, dout, positions):
        rank, size = here()
        row, most = (dout * out).sum(-1, keepdim=True), max(map(len, positions))
        dq, grads, kv = torch.zeros_like(q), [], torch.stack([padded(k, most), padded(v, most)])
        parts = [torch.empty_like(kv) for _ in positions]
        dist.all_gather(parts, kv)
        for source in range(size):
            keys = parts[source][:, :, :, : len(positions[source])]
            more, *added = block(q, *keys, lse, dout, row, positions, source)
            dq += more
            grads.append(torch.stack([padded(x, most) for x in added]))
        return dq, *total_by(grads)[:, :, :, : len(k[0, 0])]

    return ring_backward


def scattered(grads):
    own = torch.empty_like(grads[0])
    md.collectives.reduce_scatter(own, grads)
    return own


gathered = with_collectives(scattered)
nothing_travels_home = with_collectives(lambda grads: grads[dist.get_rank()])


def other_positions(q, k, v, out, lse, dout, positions):
    """Causality by the place on the own rank."""
    local = [torch.arange(len(each)) for each in positions]
    return right(q, k, v, out, lse, dout, local)


def contiguous_alone(q, k, v, out, lse, dout, positions):
    """Right if rank r has the r-th part."""
    begins = [sum(map(len, positions[:r])) for r in range(len(positions))]
    contiguous = [torch.arange(len(p)) + b for p, b in zip(positions, begins, strict=True)]
    return right(q, k, v, out, lse, dout, contiguous)


NAMED = {  # what an answer is told
    check.ring_backward: {
        n_hops: "gradients can be home after 1 hop.",
        keys_come_home: "keys and values are everywhere after 1 hop.",
        stays_at_the_left_neighbour: "dk belongs to the tokens of rank 1.",
        own_part_forgotten: "dk lacks what this rank's own queries add.",
        without_the_scale: "dq lacks the factor D ** -0.5 of the scores.",
        nothing_travels_home: "dk lacks what the other ranks' queries add.",
    }
}
ANSWERS = {
    check.window: ([1, 1.0], [31, 0, 2, 16, 32, "one"]),
    check.ulysses_over_gather: (
        [2, 2.0, (16 + 16) / 16],
        [1 / 2, 9 / 8, 17 / 16, 1, 3 / 2, 32, 16, 3.0, "twice"],
    ),
    check.ring_backward: (
        [right, leftwards, one_message, gathered],
        [
            *NAMED[check.ring_backward],
            two_of_them,
            other_positions,
            comes_home_the_other_way,
            contiguous_alone,
        ],
    ),
}
