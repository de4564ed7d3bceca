"""What torch's tensor parallel takes, and what its allocator reserves for it: a rank of eight that
share Llama 3 70B as torchtitan laid it out in December 2024, every layer recomputed, on the backend
"fake". Width and tokens are a 32nd. Prints GiB of the true size, without parameters and their
gradients: what layers keep, what there is at the peak, and what is reserved.
"""

import itertools
import json
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from minidist.measure.storages import Ledger

LAYERS, SCALE, MB, GIB = 4, 32 * 32, 2**20, 2**30
ROWS, LENGTH, WIDTH, HIDDEN, WORDS, HEAD = 16, 8192 // 32, 256, 896, 4008, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = {"q": WIDTH, "k": WIDTH // 8, "v": WIDTH // 8, "o": WIDTH}
        self.w = nn.ModuleDict({k: nn.Linear(WIDTH, n, bias=False) for k, n in sizes.items()})

    def forward(self, x):
        q, k, v = (self.w[n](x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for n in "qkv")
        k, v = (each.repeat_interleave(8, 1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.w["o"](y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.RMSNorm(WIDTH), FeedForward()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x):
        x = self.words(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


def shared(model, mesh):
    """By torchtitan's plan, parallelize_llama.py."""
    along = {"input_layouts": Shard(1), "output_layouts": Shard(-1), "use_local_output": False}
    words = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    ends = {"words": words, "norm": SequenceParallel(), "head": ColwiseParallel(**along)}
    parallelize_module(model, mesh, ends)
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    plan |= {"attention": gathered, "mlp": gathered}
    plan |= {f"attention.w.{name}": ColwiseParallel() for name in "qkv"}
    plan |= {"mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel()}
    rows = RowwiseParallel(output_layouts=Shard(1))
    plan |= {"attention.w.o": rows, "mlp.down": rows}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def reserved(changes):
    """Bytes that torch's allocator takes and keeps: the smallest free block that is large enough,
    cut if 1 MB is left, joined again when both parts are free (c10/cuda/CUDACachingAllocator.cpp).
    Only what is above 1 MB."""
    segments, total = [], 0  # each a list of [bytes, who has it]
    for record, change in changes:
        size = -(-abs(change) * SCALE // 512) * 512
        if size <= MB:
            continue
        if change < 0:
            for segment in segments:
                for block in segment:
                    block[1] = None if block[1] is record else block[1]
                segment[:] = _joined(segment)
            continue
        free = [(block, each) for each in segments for block in each]
        free = [pair for pair in free if pair[0][1] is None and pair[0][0] >= size]
        if free:
            block, segment = min(free, key=lambda pair: pair[0][0])
        else:
            block = [20 * MB if size < 10 * MB else -(-size // (2 * MB)) * 2 * MB, None]
            segments.append(segment := [block])
            total += block[0]
        if block[0] - size > MB:
            segment.insert(segment.index(block) + 1, [block[0] - size, None])
            block[0] = size
        block[1] = record
    return total


def _joined(segment):
    joined = []
    for block in segment:
        if joined and joined[-1][1] is None and block[1] is None:
            joined[-1][0] += block[0]
        else:
            joined.append(block)
    return joined


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    model = shared(Model().bfloat16(), dist.init_device_mesh("cpu", (8,)))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    with Ledger(torch.device("cpu")) as ledger, loss_parallel():
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        del logits
        loss.backward()
    most = max(itertools.accumulate(change for _, change in ledger.changes)) * SCALE
    kept = LAYERS * tokens.numel() * WIDTH * 2 / 8 * SCALE
    found = {"kept": kept, "peak": most, "reserved": reserved(ledger.changes)}
    print(json.dumps({name: nbytes / GIB for name, nbytes in found.items()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
