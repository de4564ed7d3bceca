"""The memory tracker: every byte, summed by hand; and nothing of it stays behind."""

import gc
import math
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist.instruments.measure import MemoryTracker

P = 4 * (8 * 16 + 16 + 16 * 4 + 4)  # bytes of the parameters of mlp(8, 16, 4), float32
HIDDEN, LOGITS = 4 * 10 * 16, 4 * 10 * 4  # of its results for 10 inputs


def small(examples=10):
    """A model and a batch: both there before any block."""
    torch.manual_seed(examples)
    return md.zoo.mlp(8, 16, 4), torch.randn(examples, 8), torch.randint(4, (examples,))


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def step(model, optimizer, x, y):
    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
    loss.backward()
    optimizer.step()
    return loss


def at(memory, place):
    """{category: bytes}, of those that have any, at a place of the history."""
    return {category: nbytes[place] for category, nbytes in memory.history.items() if nbytes[place]}


def patched():
    return torch.autograd.backward, torch.autograd.grad, vars(torch.UntypedStorage).get("resize_")


UNPATCHED = patched()


@pytest.mark.parametrize(
    ("make", "states", "within_step"),
    [
        (momentum, P, 0),
        # Two moments and, for each tensor, a step; the root of the largest, and a quotient.
        (torch.optim.AdamW, 2 * P + 4 * 4, 2 * 4 * 8 * 16),
    ],
)
def test_every_byte_of_an_mlp(make, states, within_step):
    model, x, y = small()
    optimizer = make(model.parameters())
    with MemoryTracker(model, optimizer) as memory:
        loss = step(model, optimizer, x, y)
    assert [phase.name for phase in memory.phases] == ["forward", "backward", "step"]
    forward, backward, update = memory.phases
    assert at(memory, forward.start) == {"parameters": P}
    assert at(memory, forward.end) == {"parameters": P, "activations": HIDDEN, "other": LOGITS}
    # log_softmax keeps its result, nll_loss the sum of its weights. The loss is one number.
    kept = {"parameters": P, "activations": HIDDEN + LOGITS + 4, "other": loss.nbytes}
    assert at(memory, backward.start) == kept
    trained = {"parameters": P, "gradients": P, "other": 4}
    assert at(memory, backward.end) == at(memory, update.start) == trained
    trained["optimizer states"] = states
    assert at(memory, update.end) == at(memory, -1) == trained
    assert memory.live == memory.after("step") and trained.items() <= memory.live.items()
    # At ReLU: what it kept, two gradients of that size, those of the last layer, the loss and its.
    within_backward = P + 3 * HIDDEN + 4 * (16 * 4 + 4) + 4 + 4
    assert memory.peak == max(within_backward, sum(trained.values()) + within_step)
    trained |= {"activations": HIDDEN + LOGITS + 4, "other": 2 * HIDDEN + 4 + 4}
    assert {category: most for category, most in memory.peak_of.items() if most} == trained


def test_every_byte_of_a_transformer_with_tied_weights():
    B, T, C, H, L, V = 3, 16, 32, 2, 2, 256
    N = B * T
    model = md.zoo.Transformer(V, 32, C, H, L)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randint(V, (B, T))
    with MemoryTracker(model, optimizer) as memory:
        step(model, optimizer, x, x)
    forward, backward, update = memory.phases
    matrices = 3 * C * C + C * C + 4 * C * C + 4 * C * C
    parameters = 4 * (V * C + 32 * C + L * (matrices + 2 * 2 * C + C + 4 * C + C) + 2 * C)
    assert at(memory, forward.start) == {"parameters": parameters}
    # Inputs of the norms (each with a mean and a deviation a token), of the linear layers and of
    # GELU; queries, keys and values; attention's result, and a log-sum for each head and token.
    block = N * C + 2 * N + N * C + 3 * N * C + N * C + N * H  # attention
    block += N * C + 2 * N + N * C + 4 * N * C + 4 * N * C  # MLP
    activations = 4 * (L * block + N * C + 2 * N + N * C) + 8 * T  # the places are int64
    logits = 4 * N * V
    kept = {"parameters": parameters, "activations": activations, "other": logits}
    assert at(memory, forward.end) == kept
    assert memory.peak_of["activations"] == activations + logits + 4
    count = len(list(model.parameters()))
    assert count == 2 + L * (2 + 2 + 1 + 2 + 4) + 2  # tied weights are one
    trained = {"parameters": parameters, "gradients": parameters, "other": 4}
    assert at(memory, backward.end) == trained
    trained["optimizer states"] = 2 * parameters + 4 * count
    assert at(memory, update.end) == trained
    assert memory.peak == sum(trained.values()) + 2 * 4 * V * C  # in the step of the embedding


def test_the_peak_is_that_of_torchs_own_tracker(monkeypatch):
    monkeypatch.setattr(torch.UntypedStorage, "resize_", torch.UntypedStorage.resize_)  # undone
    model, x, y = small()
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryTracker(model, optimizer) as memory:
        step(model, optimizer, x, y)
    model, x, y = small()
    optimizer, oracle = torch.optim.AdamW(model.parameters()), MemTracker()
    oracle.track_external(model, optimizer)
    with oracle:
        step(model, optimizer, x, y)
    assert memory.peak == oracle.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def test_the_most_of_several_categories_together():
    model, x, y = small()
    with MemoryTracker(model) as memory:
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)
    assert memory.most("gradients") == memory.peak_of["gradients"] == P
    assert memory.most(*memory.history) == memory.peak
    # Activations are freed while gradients come: together they are less than both at their most.
    both = memory.most("gradients", "activations")
    assert P < both < P + memory.peak_of["activations"]
    assert sum(memory.at_peak().values()) == memory.peak


def test_a_storage_counts_once_while_it_lives():
    before, model = torch.zeros(1000), nn.Linear(2, 1)
    with MemoryTracker(model) as memory:  # 12 bytes
        x = torch.zeros(100)
        views = [x[:50], x.view(10, 10).t(), x.detach(), nn.Parameter(x)]
        before.add_(torch.empty(1000, device="meta").numel())
        ones = torch.tensor([1.0, 1.0])  # its memory is filled before any mode sees it
        del x
        views.clear()
        del ones
        model.bias.grad = torch.ones(1)
    assert memory.history["other"] == [0, 400, 408, 8, 0, 0]
    assert at(memory, -1) == {"parameters": 12, "gradients": 4} and memory.peak == 12 + 408
    assert memory.phases == []


def test_what_is_resized():
    model = nn.Linear(2, 1, bias=False)
    with MemoryTracker(model) as memory:
        storage = torch.zeros(100).untyped_storage()
        storage.resize_(0)
        storage.resize_(40)
        weight = model.weight.untyped_storage()
        weight.resize_(0)
        weight.resize_(8)
        x = torch.zeros(1)
        x.resize_(5)
    assert memory.history["other"] == [0, 400, 0, 40, 40, 40, 44, 60]
    assert memory.history["parameters"] == [8, 8, 8, 8, 0, 8, 8, 8]


def test_evaluation_saves_nothing():
    model, x, y = small()
    with MemoryTracker(model) as memory:
        logits = torch.no_grad()(model)(x)
        model(x)  # dropped at once: so is what it saved
    assert logits.nbytes == LOGITS
    evaluation, training = memory.phases
    assert at(memory, evaluation.end) == {"parameters": P, "other": LOGITS}
    assert at(memory, training.end) == {"parameters": P, "activations": HIDDEN, "other": 2 * LOGITS}
    assert at(memory, -1) == {"parameters": P, "other": LOGITS}


@pytest.mark.parametrize("none", [True, False])
def test_accumulated_gradients_are_freed_by_zero_grad(none):
    model, x, y = small()
    optimizer = momentum(model.parameters())
    with MemoryTracker(model, optimizer) as memory:
        F.cross_entropy(model(x), y).backward()
        F.cross_entropy(model(x), y).backward()
        step(model, optimizer, x, y)
        optimizer.zero_grad(set_to_none=none)
        del model[2].weight.grad
    ends = [memory.history["gradients"][p.end] for p in memory.phases if p.name == "backward"]
    assert ends == [P] * 3 and memory.peak_of["gradients"] == P
    assert memory.live["gradients"] == (0 if none else P - 4 * 16 * 4)
    with MemoryTracker(model, optimizer) as again:  # what is there already
        pass
    assert again.history["gradients"] == [memory.live["gradients"]]
    assert again.history["optimizer states"] == [P]


def test_what_a_checkpoint_computes_again_is_an_activation():
    model, x, y = small()
    with MemoryTracker(model) as memory:
        F.cross_entropy(checkpoint(model, x, use_reentrant=False), y).backward()
    assert [phase.name for phase in memory.phases] == ["forward", "backward", "forward"]
    first, backward, again = memory.phases
    assert first.end < backward.start < again.start <= again.end < backward.end
    assert at(memory, first.end) == {"parameters": P, "other": LOGITS}
    assert at(memory, backward.start)["activations"] == LOGITS + 4  # what the loss saved
    assert at(memory, again.end)["activations"] == HIDDEN  # the loss is done


def test_training_is_the_same_with_it_and_every_run_measures_the_same():
    def train(tracked):
        model, x, y = small()
        optimizer = torch.optim.AdamW(model.parameters())
        memory = MemoryTracker(model, optimizer)
        for _ in range(2):
            if tracked:
                memory.__enter__()
            loss = step(model, optimizer, x, y)
            first = torch.autograd.grad(model(x).exp().sum(), model[2].weight, create_graph=True)
            first[0].square().sum().backward()
            optimizer.step()
            if tracked:
                memory.__exit__(None, None, None)
        return memory, [loss, *model.parameters(), *(p.grad for p in model.parameters())]

    (plain, wanted), (one, trained), (two, _) = train(False), train(True), train(True)
    assert all(map(torch.equal, wanted, trained)) and plain.history == {}
    assert one.history == two.history and one.phases == two.phases
    names = [phase.name for phase in one.phases]
    assert names == "forward backward step forward backward backward step".split()
    assert one.history["optimizer states"][0] == 2 * P + 16  # only of the second block


def test_nothing_stays_after_an_error():
    model, x, y = small()
    optimizer = momentum(model.parameters())
    memory = MemoryTracker(model, optimizer)
    for block in range(2):  # as good as new
        with pytest.raises(ValueError, match="mine"), memory:
            assert not set(patched()) & set(UNPATCHED)
            step(model, optimizer, x, y)
            with pytest.raises(RuntimeError, match="shapes"):
                model(x.t())
            failing = torch.ones(1, requires_grad=True)
            failing.register_hook(lambda _: optimizer.step(lambda: 1 / 0))  # its end is not told
            with pytest.raises(ZeroDivisionError):
                failing.sum().backward()
            step(model, optimizer, x, y)
            raise ValueError("mine")
        names = ["forward", "backward", "step"]
        assert [phase.name for phase in memory.phases] == [*names, "forward", "backward", *names]
        assert memory.live["optimizer states"] == P == memory.history["optimizer states"][-1]
        assert memory.history["gradients"][0] == block * P
        assert patched() == UNPATCHED
        assert not model._forward_hooks | model._forward_pre_hooks
        assert not optimizer._optimizer_step_pre_hooks | optimizer._optimizer_step_post_hooks
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
        assert model(x).grad_fn._saved_mat1.grad_fn is not None  # saved by autograd itself


def test_it_is_plain_data():
    model, x, y = small()
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryTracker(model, optimizer) as memory:
        step(model, optimizer, x, y)
    read = pickle.loads(pickle.dumps(memory))
    assert vars(read) == {k: v for k, v in vars(memory).items() if not k.startswith("_")}
    assert read.after("step") == memory.after("step") and read.phases == memory.phases
    assert (read.rank, read.world_size) == (0, 1)
    assert repr(read) == f"MemoryTracker(rank 0: peak {memory.peak} bytes, {4 * P + 16} at the end)"
    with pytest.raises(ValueError, match="no phase 'sleep'; there are: forward, backward, step"):
        read.after("sleep")


def tracked(wrap, steps, within=False, hook=None):
    """Train on 10 inputs on rank 0 and 16 on rank 1; `wrap` is called in the block if `within`."""
    model, x, y = small(10 + 6 * dist.get_rank())
    optimizer = torch.optim.Adam(model.parameters())
    ddp = None if within else wrap(model)
    with MemoryTracker(model, optimizer) as memory:
        ddp = ddp or wrap(model)
        if hook:
            ddp.register_comm_hook(None, hook)
        for _ in range(steps):
            optimizer.zero_grad()
            step(ddp, optimizer, x, y)
    return memory


def ends(memory, name, category):
    return [memory.history[category][p.end] for p in memory.phases if p.name == name]


# A thread of gloo gives back what it has sent a little later: the 8 bytes for each of four
# parameters, and less for torch, by which DistributedDataParallel agrees on an order.
ORDER = 8 * 4


def test_our_data_parallel_needs_no_more_than_one_rank(pools):
    for cap, within in ((25, False), (1e-4, True), (3e-4, False)):
        wrap = partial(md.DistributedDataParallel, bucket_cap_mb=cap)
        for rank, memory in enumerate(pools(2)(tracked, wrap, 3, within)):
            assert (memory.rank, memory.world_size) == (rank, 2)
            assert ends(memory, "forward", "activations") == [4 * (10 + 6 * rank) * 16] * 3
            for name in "forward", "backward", "step":
                assert ends(memory, name, "parameters") == [P] * 3
                assert ends(memory, name, "gradients") == [P] * 3  # buckets, without gaps
            assert ends(memory, "step", "optimizer states") == [2 * P + 4 * 4] * 3
            assert ends(memory, "backward", "other") == ends(memory, "step", "other") == [4] * 3
            start, sent = memory.phases[1].end, memory.history["communication buffers"]
            assert max(sent[start:]) == ORDER
            assert max(sent[:start]) >= P if within else max(sent[:start]) == 0  # rank 0's values
            assert within or memory.peak_of["gradients"] == P


def test_torchs_data_parallel_holds_the_gradients_twice(pools):
    for view, copies in ((False, P), (True, 0)):
        wrap = partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=view)
        for memory in pools(2)(tracked, wrap, 3):
            for name in "backward", "step":
                assert ends(memory, name, "parameters") == ends(memory, name, "gradients")
                assert ends(memory, name, "gradients") == [P] * 3
                for sent in ends(memory, name, "communication buffers"):
                    assert copies <= sent <= copies + ORDER, view


def test_compressed_gradients_are_half_as_many_bytes_to_send(pools):
    hook = bf16_compress_hook
    for memory in pools(2)(tracked, md.DistributedDataParallel, 1, hook=hook):
        assert memory.peak_of["communication buffers"] == P // 2
        assert memory.peak_of["gradients"] == P


def test_a_message_is_a_communication_buffer_of_its_sender(pools):
    def send():
        with MemoryTracker(nn.Linear(1, 1)) as memory:
            numbers, rank = torch.zeros(100), dist.get_rank()
            (dist.recv if rank else dist.send)(numbers, 1 - rank)
        return memory.live["communication buffers"]

    assert pools(2)(send) == [400, 400]


@pytest.mark.gpu
def test_the_allocator_of_a_gpu_has_as_many_bytes():
    gc.collect()  # what earlier tests left on the GPU goes now, not while we look
    model, x, y = (thing.cuda() for thing in small(1000))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step(model, optimizer, x, y)  # cuBLAS takes its workspace
    optimizer.zero_grad()
    torch.cuda.synchronize()
    allocated = [torch.cuda.memory_allocated()]
    with MemoryTracker(model, optimizer) as memory:
        logits = model(x)
        allocated.append(torch.cuda.memory_allocated())
        F.cross_entropy(logits, y).backward()
        allocated.append(torch.cuda.memory_allocated())
        optimizer.step()
        allocated.append(torch.cuda.memory_allocated())
    total = list(map(sum, zip(*memory.history.values(), strict=True)))
    changes = [math.copysign(bool(b - a), b - a) for a, b in zip(total, total[1:], strict=False)]
    for phase, nbytes in zip(memory.phases, allocated[1:], strict=True):
        blocks = sum(changes[: phase.end])  # more than there were at the start
        counted, truly = total[phase.end] - total[0], nbytes - allocated[0]
        assert counted <= truly <= counted + 511 * blocks, phase
