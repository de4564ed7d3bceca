"""Answers to the puzzles and the exercise of the lesson experts."""

from math import comb

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

from minidist.course.checks import experts as check


class Exchange(torch.autograd.Function):
    """The lesson's."""

    @staticmethod
    def forward(ctx, rows, sends, receives):
        ctx.back = receives, sends
        arrived = rows.new_empty(sum(receives), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), receives, sends)
        return arrived

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, *ctx.back), None, None


def exchanged(counts):
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    return theirs


def naive(x, weights, chosen, experts):
    """As the lesson has it: a row for each expert of a token."""
    n, k = len(experts), chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=n * dist.get_world_size()).view(-1, n)
    theirs = exchanged(counts)
    sends, receives = counts.sum(1).tolist(), theirs.sum(1).tolist()
    pieces = Exchange.apply(x[order // k], sends, receives).split(theirs.flatten().tolist())
    done = torch.cat([experts[i % n](piece) for i, piece in enumerate(pieces)])
    back = Exchange.apply(done, receives, sends)
    return torch.zeros_like(x).index_add(0, order // k, back * weights.flatten()[order, None])


def gates_of(x, weights, chosen, n):
    """(N, p, n): a token's weight for each expert of each rank, or 0."""
    size = dist.get_world_size()
    return x.new_zeros(len(x), size * n).scatter(1, chosen, weights).view(-1, size, n)


def summed(x, gates, experts):
    """The weighted sum of this rank's experts, each of which computes what has chosen it."""
    y = torch.zeros_like(x)
    for expert, gate in zip(experts, gates.unbind(1), strict=True):
        (rows,) = gate.nonzero(as_tuple=True)
        y = y.index_add(0, rows, expert(x[rows]) * gate[rows, None])
    return y


def once(by=summed, gates_by=gates_of, there=Exchange.apply, back=Exchange.apply, end=lambda y: y):
    def dispatch_once(x, weights, chosen, experts):
        n, size = len(experts), dist.get_world_size()
        gates = gates_by(x, weights, chosen, n)
        rank, token = (gates != 0).any(2).T.nonzero(as_tuple=True)
        sends = rank.bincount(minlength=size)
        sends, receives = sends.tolist(), exchanged(sends).tolist()
        rows = torch.cat([x[token], gates[token, rank]], 1)
        arrived, gate = there(rows, sends, receives).split([x.shape[1], n], 1)
        done = back(by(arrived, gate, experts), receives, sends)
        return end(torch.zeros_like(x).index_add(0, token, done))

    return dispatch_once


right = once()


def by_torch(rows, sends, receives):
    return all_to_all_single_autograd(rows.contiguous(), receives, sends, dist.group.WORLD)


torchs_function = once(there=by_torch, back=by_torch)


def one_message_each(x, weights, chosen, experts):
    """Rows, weights and numbers of experts in three messages; a loop over ranks and tokens."""
    n, size = len(experts), dist.get_world_size()
    tokens = [[t for t in range(len(x)) if (chosen[t] // n == r).any()] for r in range(size)]
    sends = [len(each) for each in tokens]
    flat = torch.tensor([t for each in tokens for t in each], dtype=torch.long)
    of_rank = torch.tensor([r for r in range(size) for _ in tokens[r]], dtype=torch.long)
    receives = exchanged(torch.tensor(sends)).tolist()
    arrived = Exchange.apply(x[flat], sends, receives)
    weight = Exchange.apply(weights[flat], sends, receives)
    local = Exchange.apply(chosen[flat] - n * of_rank[:, None], sends, receives)
    y = torch.zeros_like(arrived)
    for i, expert in enumerate(experts):
        rows, place = (local == i).nonzero(as_tuple=True)
        y = y.index_add(0, rows, expert(arrived[rows]) * weight[rows, place, None])
    return torch.zeros_like(x).index_add(0, flat, Exchange.apply(y, receives, sends))


# ---- wrong ones -------------------------------------------------------------------------------


def comes_back_for_each(x, weights, chosen, experts):
    """Once there, but back with a row for each expert."""
    n, size = len(experts), dist.get_world_size()
    wanted = gates_of(x, torch.ones_like(weights), chosen, n)
    rank, token = wanted.any(2).T.nonzero(as_tuple=True)
    sends = rank.bincount(minlength=size)
    sends, receives = sends.tolist(), exchanged(sends).tolist()
    rows = torch.cat([x[token], wanted[token, rank]], 1)
    arrived, here = Exchange.apply(rows, sends, receives).split([x.shape[1], n], 1)
    done, many = [], []
    for part, mask in zip(arrived.split(receives), here.split(receives), strict=True):
        of_sender = [expert(part[mask[:, i] > 0]) for i, expert in enumerate(experts)]
        done += of_sender
        many.append(sum(map(len, of_sender)))
    order = chosen.flatten().argsort(stable=True)
    expected = chosen.flatten().div(n, rounding_mode="floor").bincount(minlength=size).tolist()
    back = Exchange.apply(torch.cat(done), many, expected)
    k = chosen.shape[1]
    return torch.zeros_like(x).index_add(0, order // k, back * weights.flatten()[order, None])


def all_experts_compute(x, gates, experts):
    return torch.stack([expert(x) * gates[:, i, None] for i, expert in enumerate(experts)]).sum(0)


def without_weights(x, gates, experts):
    return summed(x, (gates != 0).to(x), experts)


def one_expert_of_a_rank(pick):
    def by(x, gates, experts):
        best = pick(gates).argmax(1, keepdim=True)
        return summed(x, torch.zeros_like(gates).scatter(1, best, gates.gather(1, best)), experts)

    return by


def without_autograd(rows, sends, receives):
    arrived = rows.new_empty(sum(receives), rows.shape[1])
    dist.all_to_all_single(arrived, rows.detach().contiguous(), receives, sends)
    return arrived


def only_where_rows_are(rows, sends, receives):
    """A rank without rows leaves the graph: the others wait for it in backward."""
    return Exchange.apply(rows if len(rows) else rows.detach(), sends, receives)


def nothing_without_tokens(x, weights, chosen, experts):
    """A rank without tokens does not take part."""
    return right(x, weights, chosen, experts) if len(x) else x


def own_experts_alone(x, weights, chosen, experts):
    gates = gates_of(x, weights, chosen, len(experts))[:, dist.get_rank()]
    return naive(x, weights, chosen, experts) * 0 + summed(x, gates, experts)


def weights_stay(x, weights, chosen, n):
    return gates_of(x, weights.detach(), chosen, n)


def everybody_gets_all(x, weights, chosen, experts):
    """Each token to each rank."""
    size, n = dist.get_world_size(), len(experts)
    sends, receives = [len(x)] * size, exchanged(torch.full((size,), len(x))).tolist()
    gates = gates_of(x, weights, chosen, n)
    rows = torch.cat([x.repeat(size, 1), gates.transpose(0, 1).flatten(0, 1)], 1)
    arrived, gate = Exchange.apply(rows, sends, receives).split([x.shape[1], n], 1)
    back = Exchange.apply(summed(arrived, gate, experts), receives, sends)
    return back.view(size, -1, x.shape[1]).sum(0)


def averaged_experts(x, gates, experts):
    """An expert's gradient is the mean over ranks: the caller's business."""

    def scaled(grad):
        return grad / dist.get_world_size()

    for parameter in experts.parameters():
        parameter.register_hook(scaled)
    return summed(x, gates, experts)


comes_in_float32 = once(end=lambda y: y.float())
nothing_to_go_back = once(end=lambda y: y.detach())
through_all_experts = once(by=all_experts_compute)
weights_forgotten = once(by=without_weights)
largest_of_a_rank = once(by=one_expert_of_a_rank(torch.clone))
rows_without_autograd = once(there=without_autograd)
weights_without_autograd = once(gates_by=weights_stay)
leaves_the_graph = once(back=only_where_rows_are)
mean_of_experts = once(by=averaged_experts)

NAMED = {  # what an answer is told
    check.dispatch_once: {
        naive: "both ways there is a row for each expert of a token.",
        comes_back_for_each: "one way there is a row for each expert of a token.",
        through_all_experts: "rows, and 36 have chosen them.",
        weights_forgotten: "y lacks the weights of the experts.",
        largest_of_a_rank: "y has one expert of a rank where a token has chosen several.",
        own_experts_alone: "y has only what the experts of this rank add.",
        weights_without_autograd: "no gradient reaches weights: it travels without a function of "
        "autograd.",
        nothing_to_go_back: "in backward the other ranks would wait.",
        mean_of_experts: "the gradient of an expert is not the sum over the tokens of all ranks.",
    }
}
RIGHT = 8 * (1 - comb(224, 8) / comb(256, 8))
ANSWERS = {
    check.nodes_a_token: (
        [RIGHT, 8 - 8 * comb(224, 8) / comb(256, 8)],
        [8, 4, 8 * (1 - (7 / 8) ** 8), 8 - RIGHT, RIGHT / 8, 1, 5.29, 5.0, "five"],
    ),
    check.router_gradient: ([0, 0.0, 5e-16, torch.zeros(())], [1, 0.9, -1.0, "none", "0"]),
    check.dispatch_once: (
        [right, torchs_function, one_message_each],
        [
            *NAMED[check.dispatch_once],
            comes_in_float32,
            nothing_without_tokens,
            rows_without_autograd,
            leaves_the_graph,
            everybody_gets_all,
        ],
    ),
}
