"""minidist: distributed training that you run, measure and read.

    import minidist as md

    with md.ranks(4) as r:        # four processes
        print(r(function))        # one result a rank

Each lesson of the course teaches one module of this package.
"""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from minidist.instruments.link import Link

if TYPE_CHECKING or find_spec("torch"):  # what only computes with numbers needs none, in a browser
    from minidist.machine.runtime import RankError
    from minidist.rank import launch, ranks

if TYPE_CHECKING:
    from minidist import (
        averaging,
        checkpointing,
        collectives,
        context_parallel,
        data_parallel,
        distributed_data_parallel,
        experts,
        fully_sharded,
        mixed,
        mixed_precision,
        offload,
        parameter_server,
        pipeline,
        rank,
        saving,
        tensor_parallel,
        zero,
    )
    from minidist.checkpointing import checkpoint_wrapper
    from minidist.context_parallel import ContextParallel
    from minidist.course import zoo
    from minidist.course.prediction import predict
    from minidist.data_parallel import DataParallel
    from minidist.distributed_data_parallel import DistributedDataParallel
    from minidist.fully_sharded import FullyShardedDataParallel
    from minidist.fully_sharded.fully_shard import fully_shard
    from minidist.instruments import (
        compare,
        measure,
        parity,
        planner,
        plot,
        scaling,
        tracing,
        watching,
    )
    from minidist.instruments.watching import watch
    from minidist.machine import backend
    from minidist.mixed_precision import ShardedGradScaler
    from minidist.offload import OffloadedOptimizer
    from minidist.pipeline import Pipeline
    from minidist.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        vocab_parallel_cross_entropy,
    )
    from minidist.zero import ShardedDataParallel, ZeroRedundancyOptimizer

__version__ = "0.1.0"
__all__ = [
    "ColumnParallelLinear",
    "ContextParallel",
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "Link",
    "OffloadedOptimizer",
    "Pipeline",
    "RankError",
    "RowParallelLinear",
    "ShardedDataParallel",
    "ShardedGradScaler",
    "VocabParallelEmbedding",
    "ZeroRedundancyOptimizer",
    "averaging",
    "backend",
    "checkpoint_wrapper",
    "checkpointing",
    "collectives",
    "compare",
    "context_parallel",
    "data_parallel",
    "distributed_data_parallel",
    "experts",
    "fully_shard",
    "fully_sharded",
    "launch",
    "measure",
    "mixed",
    "mixed_precision",
    "offload",
    "parameter_server",
    "parity",
    "pipeline",
    "planner",
    "plot",
    "predict",
    "rank",
    "ranks",
    "saving",
    "scaling",
    "tensor_parallel",
    "tracing",
    "vocab_parallel_cross_entropy",
    "watch",
    "watching",
    "zero",
    "zoo",
]
NAMES = {  # what lessons use by name, by the module that it is in
    "checkpointing": ["checkpoint_wrapper"],
    "context_parallel": ["ContextParallel"],
    "course.prediction": ["predict"],
    "data_parallel": ["DataParallel"],
    "distributed_data_parallel": ["DistributedDataParallel"],
    "fully_sharded": ["FullyShardedDataParallel", "fully_shard"],
    "instruments.watching": ["watch"],
    "mixed_precision": ["ShardedGradScaler"],
    "offload": ["OffloadedOptimizer"],
    "pipeline": ["Pipeline"],
    "tensor_parallel": (
        "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding vocab_parallel_cross_entropy"
    ).split(),
    "zero": ["ShardedDataParallel", "ZeroRedundancyOptimizer"],
}
FLOORS = {  # rooms that are not a strategy, by the folder that they are in
    "course": ["zoo"],
    "instruments": "compare measure parity planner plot scaling tracing watching".split(),
    "machine": ["backend"],
}


def __getattr__(name: str) -> Any:
    # On first use: a rank that draws nothing should not wait for matplotlib.
    for module, names in NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f"minidist.{module}"), name)
    if name not in __all__:
        raise AttributeError(f"module 'minidist' has no attribute {name!r}")
    floor = next((f"{floor}." for floor, rooms in FLOORS.items() if name in rooms), "")
    return importlib.import_module(f"minidist.{floor}{name}")


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext minidist`: the magic `%%ranks`."""
    from minidist.machine.notebook import load

    load(shell)
