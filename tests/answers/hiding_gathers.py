"""Answers to the puzzles and the exercise of the lesson hiding_gathers."""

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from answers.fully_sharded import Again, Flat
from minidist.course.checks import hiding_gathers as check


class Ahead(Flat):
    """While it computes, `after` is gathered in forward, `before` in backward."""

    pending = None

    def begin(self):
        shards = [torch.empty_like(self.shard.data) for _ in range(dist.get_world_size())]
        self.pending = shards, dist.all_gather(shards, self.shard.data, async_op=True)

    def gather(self):
        if self.pending is None:
            self.begin()
        (shards, work), self.pending = self.pending, None
        work.wait()
        for each in self.others["backward" if torch.is_grad_enabled() else "forward"]:
            each.begin()
        return self.full(torch.cat(shards))

    def full(self, flat):
        sizes = [shape.numel() for shape in self.shapes.values()]
        named = zip(self.shapes.items(), flat[: sum(sizes)].split(sizes), strict=True)
        return {name: piece.view(shape) for (name, shape), piece in named}


class Both(torch.autograd.Function):
    """`Again`, that tells the unit in which pass it is."""

    @staticmethod
    def forward(ctx, x, unit, *shards):
        with torch.no_grad():
            return Again.forward(ctx, x, unit, *shards)

    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            return Again.backward(ctx, g)


Ahead.function = Both


def chain(modules, unit=Ahead, back=True):
    units = [unit(module) for module in modules]
    for i, each in enumerate(units):
        ways = {"forward": units[i + 1 : i + 2], "backward": units[:i][-1:] if back else []}
        each.others = ways
    return units


class Hooked(Ahead):
    """No second forward: autograd saves where a parameter was, and it is gathered again."""

    def forward(self, x):
        unit, again = self, []

        class Gather(torch.autograd.Function):
            @staticmethod
            def forward(ctx, shard):
                return torch.cat([each.flatten() for each in unit.gather().values()])

            @staticmethod
            def backward(ctx, gradient):
                return unit.reduce([gradient])[0]

        flat = Gather.apply(self.shard)

        place = flat.untyped_storage().data_ptr()

        def save(t):
            own = t.untyped_storage().data_ptr() == place
            return (t.shape, t.stride(), t.storage_offset()) if own else t

        def load(saved):
            if isinstance(saved, torch.Tensor):
                return saved
            if not again:
                with torch.enable_grad():
                    pieces = [each.detach().flatten() for each in unit.gather().values()]
                again.append(torch.cat(pieces))
            return again[0].as_strided(*saved)

        with saved_tensors_hooks(save, load):
            return functional_call(self.module[0], self.full(flat), (x,))


def hooked(modules):
    return chain(modules, Hooked)


def not_ahead(modules):
    return [Flat(module) for module in modules]


def forward_only(modules):
    return chain(modules, back=False)


class InTurn(Ahead):
    """Gathers ahead, and waits for it."""

    def begin(self):
        super().begin()
        self.pending[1].wait()


def in_turn(modules):
    return chain(modules, InTurn)


def all_at_once(modules):
    units = chain(modules)
    for i, each in enumerate(units):
        each.others = {"forward": units[1:] if i == 0 else [], "backward": each.others["backward"]}
    return units


def last_first(modules):
    return chain(modules)[::-1]


def three_of_four(modules):
    return chain(modules)[:3]


NAMED = {  # what an answer is told
    check.prefetch: {in_turn: "wait for it where the unit is used."},
}
ANSWERS = {
    check.helps: (
        [{3, 6}, [6, 3], (3, 6), "36"],
        [{3}, {6}, {1, 2, 3}, {3, 5, 6}, {2, 3, 6}, {3, 4, 6}, {1, 2, 3, 4, 5, 6}, {3, 6, 7}],
    ),
    check.tokens: (
        [1_500, 6 * 400e12 / (4 * 400e9)],
        [1_000, 3_000, 2_000, 1333, 12_000, 8_000, 6_000, 1.5, "1,500 tokens"],
    ),
    check.prefetch: (
        [chain, hooked],
        [not_ahead, forward_only, in_turn, all_at_once, last_first, three_of_four, Ahead],
    ),
}
