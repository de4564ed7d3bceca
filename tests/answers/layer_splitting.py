"""Answers to the puzzles and the exercise of the lesson layer_splitting."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from minidist.course.checks import layer_splitting as check


class Passes:
    """Forward and backward of one micro-batch, with `isend` or `send`."""

    def __init__(self, stage, images, labels, m, width, wait=False, weight=True):
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        self.stage, self.width, self.wait = stage, width, wait
        self.images, self.labels = images.chunk(m), labels.chunk(m)
        self.m, self.weight, self.kept, self.sending, self.loss = m, weight, {}, [], 0.0

    def send(self, x, to):
        if self.wait:
            dist.send(x, to)
        else:
            self.sending.append((dist.isend(x, to), x))

    def forward(self, i):
        x = self.images[i]
        if self.rank > 0:
            x = torch.empty(len(x), self.width, dtype=x.dtype)
            dist.recv(x, self.rank - 1)
            x.requires_grad_()
        y = self.stage(x)
        if self.rank < self.last:
            self.send(y.detach(), self.rank + 1)
        else:
            y = F.cross_entropy(y, self.labels[i]) / (self.m if self.weight else 1)
            self.loss += y.item()
        self.kept[i] = x, y

    def backward(self, i):
        x, y = self.kept.pop(i)
        gradient = None
        if self.rank < self.last:
            gradient = torch.empty_like(y)
            dist.recv(gradient, self.rank + 1)
        y.backward(gradient)
        if self.rank > 0:
            self.send(x.grad, self.rank - 1)

    def finish(self):
        for work, _ in self.sending:
            work.wait()
        return self.loss


def in_turns(passes, warmup):
    m = passes.m
    warmup = min(warmup, m)
    for i in range(warmup):
        passes.forward(i)
    for i in range(warmup, m):
        passes.forward(i)
        passes.backward(i - warmup)
    for i in range(m - warmup, m):
        passes.backward(i)
    return passes.finish()


def immediate(stage, images, labels, m, width):
    passes = Passes(stage, images, labels, m, width)
    return in_turns(passes, passes.last - passes.rank)


def by_count(stage, images, labels, m, width):
    """Backward as soon as as many are kept as may be."""
    passes = Passes(stage, images, labels, m, width)
    done = 0
    for i in range(m):
        passes.forward(i)
        if i - done + 1 == passes.last - passes.rank + 1:
            passes.backward(done)
            done += 1
    while done < m:
        passes.backward(done)
        done += 1
    return passes.finish()


def gpipe(stage, images, labels, m, width):
    passes = Passes(stage, images, labels, m, width)
    return in_turns(passes, m)


def one_at_a_time(stage, images, labels, m, width):
    return in_turns(Passes(stage, images, labels, m, width), 0)


def one_too_many(stage, images, labels, m, width):
    passes = Passes(stage, images, labels, m, width)
    return in_turns(passes, passes.last - passes.rank + 1)


def sends_that_wait(stage, images, labels, m, width):
    passes = Passes(stage, images, labels, m, width, wait=True)
    return in_turns(passes, passes.last - passes.rank)


def without_the_weight(stage, images, labels, m, width):
    passes = Passes(stage, images, labels, m, width, weight=False)
    return in_turns(passes, passes.last - passes.rank)


def without_microbatches(stage, images, labels, m, width):
    return immediate(stage, images, labels, 1, width)


def without_the_loss(stage, images, labels, m, width):
    immediate(stage, images, labels, m, width)


def last_loss_only(stage, images, labels, m, width):
    return immediate(stage, images, labels, m, width) / m


ANSWERS = {
    check.idle_part: (
        [7 / 39, 0.1794871795, torch.tensor(7 / 39, dtype=torch.float64)],
        [7 / 32, 8 / 39, 8 / 40, 7 / 40, 700 / 39, 32 / 39, 0.18, "7/39"],
    ),
    check.slow_stage: ([570, 570.0], [330, 660, 1200, 190, 480, 412.5, 0.57, "570 ms"]),
    check.one_f_one_b: (
        [immediate, by_count],
        [
            gpipe,
            one_at_a_time,
            one_too_many,
            sends_that_wait,
            without_the_weight,
            without_microbatches,
            without_the_loss,
            last_loss_only,
        ],
    ),
}
