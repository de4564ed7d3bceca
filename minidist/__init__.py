"""minidist: distributed training that you run, measure and read.

    import minidist as md

    with md.ranks(4) as r:        # four processes
        print(r(function))        # one result a rank

Each lesson of the course teaches one module of this package.
"""

import importlib
from typing import TYPE_CHECKING, Any

from minidist.link import Link
from minidist.rank import launch, ranks
from minidist.runtime import RankError

if TYPE_CHECKING:
    from minidist import (
        averaging,
        backend,
        checkpointing,
        collectives,
        compare,
        context_parallel,
        data_parallel,
        distributed_data_parallel,
        experts,
        fully_sharded,
        measure,
        mixed,
        mixed_precision,
        offload,
        parameter_server,
        parity,
        pipeline,
        planner,
        plot,
        rank,
        saving,
        scaling,
        tensor_parallel,
        tracing,
        watching,
        zero,
        zoo,
    )
    from minidist.checkpointing import checkpoint_wrapper
    from minidist.context_parallel import ContextParallel
    from minidist.data_parallel import DataParallel
    from minidist.distributed_data_parallel import DistributedDataParallel
    from minidist.fully_sharded import FullyShardedDataParallel
    from minidist.fully_sharded.fully_shard import fully_shard
    from minidist.mixed_precision import ShardedGradScaler
    from minidist.offload import OffloadedOptimizer
    from minidist.pipeline import Pipeline
    from minidist.prediction import predict
    from minidist.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        vocab_parallel_cross_entropy,
    )
    from minidist.watching import watch
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
STRATEGIES = {  # what lessons use by name, and the module that it is in
    "ColumnParallelLinear": "tensor_parallel",
    "ContextParallel": "context_parallel",
    "DataParallel": "data_parallel",
    "DistributedDataParallel": "distributed_data_parallel",
    "FullyShardedDataParallel": "fully_sharded",
    "OffloadedOptimizer": "offload",
    "Pipeline": "pipeline",
    "RowParallelLinear": "tensor_parallel",
    "ShardedDataParallel": "zero",
    "ShardedGradScaler": "mixed_precision",
    "VocabParallelEmbedding": "tensor_parallel",
    "ZeroRedundancyOptimizer": "zero",
    "checkpoint_wrapper": "checkpointing",
    "fully_shard": "fully_sharded",
    "predict": "prediction",
    "vocab_parallel_cross_entropy": "tensor_parallel",
    "watch": "watching",
}


def __getattr__(name: str) -> Any:
    # On first use: a rank that draws nothing should not wait for matplotlib.
    if name in STRATEGIES:
        return getattr(importlib.import_module(f"minidist.{STRATEGIES[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"minidist.{name}")
    raise AttributeError(f"module 'minidist' has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext minidist`: the magic `%%ranks`."""
    from minidist.notebook import load

    load(shell)
