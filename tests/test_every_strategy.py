"""What holds of every strategy: it trains as one process does, and a reader of one step opens few
files."""

import sys
import threading
from dataclasses import replace
from pathlib import Path
from unittest import mock

import fuzz
import pytest
import torch.distributed as dist
from fuzz.beside_one_process import STRATEGIES, made
from fuzz.random_models import data
from torch.distributed.tensor import DTensor

import minidist as md

ROOM = Path(md.__file__).parent

# By its number a model is always the same: without ties, but for the transformer's ends. If it is
# odd, a strategy that has a function of its own to clip uses that, else torch's.
MODELS = {"mlp": 3, "batch norm": 1, "transformer": 2}
# These cut within a layer, and have a plan for how to cut a transformer's only.
MODELS_OF = {"tensor": ["transformer"], "mixed": ["transformer"]}
# SGD, by which a gradient of the wrong size is seen, unlike by Adam. But what is saved and loaded
# has more states with AdamW: a step, two moments, and the largest of one.
SGD = {"optimizers": ("SGD",), "passes": 1, "waiting": "nothing", "clip": None, "evaluation": ""}
LOOPS = {
    "plain": SGD,
    "accumulate": SGD | {"passes": 3, "waiting": "no_sync"},
    "clip": SGD | {"clip": 0.1},
    "evaluate between": SGD | {"evaluation": "inference_mode"},
    "save and load": SGD | {"optimizers": ("AdamW",)},
}
# Of a mesh two axes have two ranks. The names: data, pipeline, tensor.
MESHES = [(2, 1, 2), (2, 2, 1), (1, 2, 2)]
# By the strategy and the number of the loop.
OPTIONS = {
    "ddp": lambda i: {"bucket_cap_mb": 1e-3},  # several buckets
    "zero1": lambda i: {"bucket_cap_mb": 1e-3},
    "zero2": lambda i: {},
    "fsdp": lambda i: {"units": "by class", "hybrid": False},
    "fully_shard": lambda i: {"units": "by class", "hybrid": False},
    "pipeline": lambda i: {"microbatches": 2},
    "tensor": lambda i: {"sequence_parallel": i % 2 == 1},
    "mixed": lambda i: {
        "mesh": MESHES[i % 3],
        "shard": ["nothing", "states"][i % 2],
        "microbatches": 2,
    },
}
SIZES = {"tensor": [2], "mixed": [4]}  # else 2 and 3: heads are shared out evenly
CASES = [
    (strategy, model, loop)
    for strategy in STRATEGIES
    for model in MODELS_OF.get(strategy, MODELS)
    for loop in LOOPS
]


def trial_of(strategy, model="transformer", loop="plain", folder=""):
    i, j = list(LOOPS).index(loop), list(MODELS).index(model)
    sizes = SIZES.get(strategy, [2, 3])
    return fuzz.Trial(
        MODELS[model],
        sizes[(i + j) % len(sizes)],
        "",  # on the backend of the pools
        model,
        strategy,
        batch=4,
        options=OPTIONS[strategy](i),
        checkpoint=folder if loop == "save and load" else "",
        **LOOPS[loop],
    )


@pytest.mark.parametrize(("strategy", "model", "loop"), CASES)
def test_it_trains_as_one_process_does(pools, tmp_path, strategy, model, loop):
    """In float64: relatively to 1e-12."""
    trial = trial_of(strategy, model, loop, str(tmp_path))
    assert pools(trial.world_size)(fuzz.on_a_rank, trial, 1e-12) == [""] * trial.world_size


@pytest.mark.parametrize("strategy", ["fsdp", "fully_shard", "tensor"])
def test_a_mesh_is_of_the_devices_where_the_module_is(pools, strategy):
    """Here on the CPU, though the rank has a GPU: its group speaks NCCL."""

    def run(trial):
        with mock.patch.object(dist, "get_backend_config", lambda *_: "cpu:gloo,cuda:nccl"):
            assert md.rank.device().type == "cuda"
            ours = STRATEGIES[strategy](trial, made(trial))
        ours.step(list(data(trial, 0)))
        parameters = ours.model.parameters()
        return {p.device_mesh.device_type for p in parameters if isinstance(p, DTensor)}

    assert pools(2)(run, trial_of(strategy)) == [{"cpu"}] * 2


# The helpers in `common` and `collectives` say by their names what they do; all else is to be read.
# A mesh is read with the pipeline that it consists of. fsdp: four, and the collectives of ZeRO.
MOST = {"ddp": 5, "zero1": 5, "zero2": 5, "fsdp": 5, "fully_shard": 4, "pipeline": 3, "mixed": 5}


@pytest.mark.parametrize("strategy", MOST)
def test_a_reader_of_one_step_opens_few_files(pools, strategy):
    def run(trial):
        ours = STRATEGIES[strategy](trial, made(trial))
        for step in range(2):  # afterwards all is as it stays
            ours.step(list(data(trial, step)))
        seen = set()

        def note(frame, event, _):
            if event == "call":
                seen.add(frame.f_code.co_filename)

        sys.setprofile(note)
        threading.setprofile(note)
        try:
            ours.step(list(data(trial, 2)))
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        return seen

    trial = trial_of(strategy, "mlp")
    if strategy == "mixed":
        trial = replace(trial, options=trial.options | {"mesh": (2, 1, 1)})
    seen = pools(2)(run, trial)[0]
    within = [Path(name).relative_to(ROOM) for name in seen if str(ROOM) in name]
    below = "common", "collectives", "instruments", "machine", "rank.py"
    read = sorted(str(name) for name in within if name.parts[0] not in below)
    assert read and len(read) <= MOST[strategy], read
