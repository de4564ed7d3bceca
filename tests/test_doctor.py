"""The doctor for training scripts: small ones after public scripts, of which half train as one
process does; and a few of which it cannot say so."""

import re
from pathlib import Path

import pytest
import torch
from programs import few

from minidist.instruments.doctor.feed import joined

pytestmark = [
    pytest.mark.timeout(280),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes by /proc"),
]

SCRIPTS = Path(__file__).parent / "doctor"
DDP, BY_HAND, NO_SYNC, FSDP = "ddp_tutorial", "by_hand", "no_sync", "fsdp_tutorial"
# Of a script that is right, others are made: what stands there, and what is written for it.
MODEL = "nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)"
DDP_STEPS = "        optimizer.step()\n"
DIVIDES = "        param.grad /= dist.get_world_size()\n"
AVERAGES = "    average_gradients(model)\n"
ADAM = {"SGD(": "Adam(", ", momentum=0.5": ""}
SGD, RATE = "torch.optim.SGD(model.parameters(), lr=0.1)", "lr=0.1)\n"
SCHEDULED = f"{RATE}scheduler = torch.optim.lr_scheduler."
MINIDIST = "    model = md.ShardedDataParallel(model, optimizer)\n"
ZERO = "optimizer = md.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)\n"
MADE_RIGHT = {
    "autocast": (
        DDP,
        {
            "        loss = F.cross": "        with torch.autocast('cpu', torch.bfloat16):\n"
            "            loss = F.cross"
        },
    ),
    "minidist_ddp": (
        "minidist_zero",
        {MINIDIST: "    model = md.DistributedDataParallel(model)\n"},
    ),
    "minidist_fsdp": (
        "minidist_zero",
        {
            ZERO: "model = md.FullyShardedDataParallel(model)\n",
            MINIDIST: "    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)\n",
        },
    ),
    "scheduler": (
        DDP,
        {
            RATE: f"{SCHEDULED}OneCycleLR(optimizer, 0.5, total_steps=2 * len(loader))\n",
            DDP_STEPS: f"{DDP_STEPS}        scheduler.step()\n",
        },
    ),
    "zero_tutorial": (
        DDP,
        {
            SGD: "ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)",
            "from torch import nn\n": "from torch import nn\n"
            "from torch.distributed.optim import ZeroRedundancyOptimizer\n",
        },
    ),
}
MADE_WRONG = {
    "always_no_sync": (NO_SYNC, {"nullcontext() if last else model.no_sync()": "model.no_sync()"}),
    "averages_parameters": (
        BY_HAND,
        {
            **{AVERAGES: "", **ADAM},
            "    optimizer.step()\n": "    optimizer.step()\n"
            "    for p in model.parameters():\n"
            "        dist.all_reduce(p.data)\n"
            "        p.data /= world_size\n",
        },
    ),
    "buffers": (BY_HAND, {MODEL: "nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)"}),
    "clip_first": (
        BY_HAND,
        {
            AVERAGES: f"    nn.utils.clip_grad_norm_(model.parameters(), 0.2)\n{AVERAGES}",
            "x, y = digits()\n": "x, y = digits()\nx = x * (1 + rank)\n",
        },
    ),
    "divided_twice": (
        DDP,
        {"F.cross_entropy(model(x), y)": "F.cross_entropy(model(x), y) / world_size"},
    ),
    "mean_of_means": (
        "tokens",
        {"(loss / count * dist.get_world_size())": "(loss / (targets != -100).sum())"},
    ),
    "never_zeroed": (DDP, {"optimizer.zero_grad()": "pass"}),
    "no_broadcast": (BY_HAND, {"manual_seed(1234)": "manual_seed(rank)"}),
    "no_group": (
        DDP,
        {"model.parameters()": "[p for p in model.parameters() if p.ndim > 1]"},
    ),
    "no_sampler": (
        "lightning",
        {'strategy="ddp",': 'strategy="ddp", use_distributed_sampler=False,'},
    ),
    "no_sync_last": (NO_SYNC, {"if last else": "if number % 4 == 1 else"}),
    "optimizer_first": (
        FSDP,
        {
            "optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)\n": "",
            "for layer in model[:3]:": "optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)\n"
            "for layer in model[:3]:",
            "optimizer.zero_grad()": "model.zero_grad()",
        },
    ),
    "past_the_wrapper": (
        "accelerate",
        {
            "F.cross_entropy(model(x)": "F.cross_entropy(accelerator.unwrap_model(model)(x)",
            "accelerator.clip_grad_norm_(model.parameters(), 1.0)": "pass",
        },
    ),
    "rank_skips": (
        BY_HAND,
        {"    optimizer.step()": "    if rank == 0:\n        optimizer.step()"},
    ),
    "rate_by_rank": (DDP, {"lr=0.1": "lr=0.1 * (1 + rank)"}),
    "rate_by_world_size": (DDP, {"lr=0.1": "lr=0.1 * world_size"}),
    "replaced_after": (
        DDP,
        {
            "nn.Linear(32, 4)))": "nn.Linear(32, 4)), find_unused_parameters=True)",
            "optimizer = ": "model.module[2] = nn.Linear(32, 4)\noptimizer = ",
        },
    ),
    "scheduler_on_rank_0": (
        DDP,
        {
            RATE: f"{SCHEDULED}ExponentialLR(optimizer, 0.9)\n",
            DDP_STEPS: f"{DDP_STEPS}        if rank == 0:\n            scheduler.step()\n",
        },
    ),
    "sum": (BY_HAND, {DIVIDES: "", **ADAM}),
}
FAULTS = {  # what the sentence names
    "always_no_sync": "rank 0 part 0: 1 for 0.5, .*rank 1 part 0: 0 for 0.5",
    "averages_parameters": "rank 0: 1 for 0.5, rank 1: 0 for 0.5: was nothing averaged",
    "buffers": "running means of batch norm are others",
    "clip_first": r"rank 0: 0[\d.]+ for 0[\d.]+, rank 1: 0[\d.]+ for 0",
    "divided_twice": "0.5 times what they should be: divided twice",
    "mean_of_means": "rank 0: 0.5 for 0.235, rank 1: 0.5 for 0.765: a mean of means",
    "never_zeroed": "Step 2: the gradient of 0.weight still has that of step 1",
    "no_broadcast": r"0.weight \(and 3 more\) of rank 1 begin with other weights than rank 0's",
    "no_group": r"0.bias \(and 1 more\) .* in no optimizer's groups",
    "no_sampler": "8 of the 8 examples of rank 1 are rank 0's as well",
    "no_sync_last": "rank 1 part 0: 0.5 for 0.5, rank 1 part 1: 0 for 0.5",
    "optimizer_first": r"0.0.weight \(and 7 more\) .* in no optimizer's groups",
    "past_the_wrapper": "rank 0: 1 for 0.5, rank 1: 0 for 0.5: was nothing averaged",
    "rank_skips": "rank1 takes 0 of them in 4 forward passes",
    "rate_by_rank": "rank 1 steps with lr = 0.2, and 0.1 on rank 0",
    "rate_by_world_size": "lr = 0.2, and 0.1 in one process",
    "replaced_after": r"2.weight \(and 1 more\) .*rank 0: 1 for 0.5, rank 1: 0 for 0.5",
    "scheduler_on_rank_0": "Step 2: rank 1 steps with lr = 0.1, and 0.09 on rank 0",
    "sum": "2 times what they should be: a sum where a mean should be",
    # Not planted: transformers 5.23.0 has it.
    "trainer": "2 times what they should be: a sum where a mean should be",
}
RIGHT = sorted([*MADE_RIGHT, *(p.stem.removeprefix("right_") for p in SCRIPTS.glob("right_*.py"))])
DAY = {"right_nanogpt", "right_fsdp_tutorial", "wrong_sum"}


def source_of(name):
    kind, _, script = name.partition("_")
    made = MADE_RIGHT if kind == "right" else MADE_WRONG
    if script not in made:
        return (SCRIPTS / f"{name}.py").read_text()
    right, edits = made[script]
    source = source_of(f"right_{right}")
    for old, new in edits.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def scripts():
    every = [*(f"right_{name}" for name in RIGHT), *(f"wrong_{name}" for name in FAULTS)]
    for case in few(every, DAY):
        name = case if isinstance(case, str) else case.values[0]
        tools = re.search(
            r"^(import|from) (accelerate|lightning|transformers)", source_of(name), re.M
        )
        marks = () if isinstance(case, str) else case.marks
        yield pytest.param(name, marks=[*marks, pytest.mark.tools] if tools else marks)


def consult(start, script, *words):
    """The exit code, and what it says. It leaves nothing behind."""
    agent = start("-m", "minidist", "doctor", *words, script, python=True)
    code = agent.finish()
    assert not agent.alive() and not agent.temporary()
    return code, agent.printed()


@pytest.mark.parametrize("name", [*scripts()])
def test_a_script_trains_as_one_process_or_not(start, tmp_path, name):
    (script := tmp_path / "script.py").write_text(source_of(name))
    code, said = consult(start, script)
    if name.startswith("right_"):
        assert (code, said) == (0, "On 2 ranks it trains as in one process, for 3 steps.\n")
    else:
        assert code == 1 and re.search(FAULTS[name.removeprefix("wrong_")], said), said
        assert said.count("\n") == 1


GROUP = 'import torch, torch.distributed as dist\ndist.init_process_group("gloo")\n'
LOOP = """
model, x = torch.nn.{}, torch.randn(4, 5, 6)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    model(x)[0].square().mean().backward()
    optimizer.step()
"""
UNCLEAR = {
    "no step": (GROUP, "ends without a step"),
    "no group": ("import torch" + LOOP.format("Linear(6, 2)"), "makes no process group"),
    "fails": (GROUP + "raise ValueError('no data')", "fails on 2 ranks:\n(.*\n)*.*no data"),
    "two": (
        GROUP + "torch.manual_seed(dist.get_rank())\nmodel = torch.nn.Linear(6, 2)\n"
        "for p in model.parameters(): dist.broadcast(p.data, 0)\nassert dist.get_world_size() == 2"
        + LOOP.format("parallel.DistributedDataParallel(model)"),
        "fails in one process",
    ),
    "random": (
        GROUP + "torch.manual_seed(0)\nmodel = torch.nn.LSTM(6, 3, 2, dropout=0.5)\n"
        "torch.manual_seed(dist.get_rank())"
        + LOOP.format("parallel.DistributedDataParallel(model)"),
        "draws random numbers",
    ),
    "waits": (
        GROUP + "if dist.get_rank(): dist.barrier()\nelse: import time; time.sleep(900)",
        "--seconds gives more time",
    ),
}


@pytest.mark.parametrize("case", few(UNCLEAR, {"fails"}))
def test_it_says_what_it_cannot_say(start, tmp_path, case):
    source, words = UNCLEAR[case]
    (tmp_path / "script.py").write_text(source)
    code, said = consult(start, tmp_path / "script.py", "--seconds", 40)
    assert code == 2 and re.search(words, said), said


def test_batches_are_joined_examples_first():
    class Encoding(dict):
        pass

    a = Encoding(x=torch.zeros(2, 3), n=torch.tensor(1), more=[torch.ones(2), "word"])
    b = Encoding(x=torch.ones(1, 3), n=torch.tensor(2), more=[torch.ones(1), "other"])
    both = joined([a, b])
    assert type(both) is Encoding and both["x"].tolist() == [[0] * 3] * 2 + [[1] * 3]
    assert both["n"] == 1 and both["more"][0].tolist() == [1] * 3 and both["more"][1] == "word"
