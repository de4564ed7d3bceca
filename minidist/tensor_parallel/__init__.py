"""Feature splitting, also called tensor parallelism. One layer, computed by many ranks.

All ranks see the same batch, and each has a part of every large weight. To read, in this order:

    naive        the idea: two layers, and one all_reduce each way
    operators    how tensors enter and leave a region that ranks compute apart
    layer        what all layers are: shards of a dense one
    layers       linear layers split by columns and by rows, embedding
    qkv          queries, keys and values in one layer
    loss         of logits that are split by vocabulary
    block        a transformer block (`random`: dropout on sharded tensors)
    styles       what can be done to a module: torch's names for it, and ours
    plan         any model, by the names of its parts (`ready_plans`)
    model        a whole model: its layers replaced, its replicas, its checkpoint
    dtensors     its shards as DTensors, for torch's own functions (`parallelize_module`)

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism" (arXiv 1909.08053). Lesson: feature_splitting. For vocabulary, dropout and
sequence parallel: lesson: sequence_parallel.
"""

from minidist.tensor_parallel.block import ParallelBlock, SequenceParallel
from minidist.tensor_parallel.dtensors import parallelize_module
from minidist.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelLinear,
)
from minidist.tensor_parallel.loss import vocab_parallel_cross_entropy
from minidist.tensor_parallel.model import (
    check_replicas,
    full_state_dict,
    load_full_state_dict,
    split,
)
from minidist.tensor_parallel.operators import (
    copy_to_group,
    gather_from_group,
    gather_from_sequence,
    reduce_from_group,
    reduce_scatter_to_sequence,
    scatter_to_group,
)
from minidist.tensor_parallel.qkv import QKVParallelLinear
from minidist.tensor_parallel.random import fork_rng
from minidist.tensor_parallel.ready_plans import gpt2_plan, llama_plan, transformer_plan
from minidist.tensor_parallel.styles import heads, qkv

__all__ = [
    "ColumnParallelLinear",
    "ParallelBlock",
    "QKVParallelLinear",
    "RowParallelLinear",
    "SequenceParallel",
    "VocabParallelEmbedding",
    "VocabParallelLinear",
    "check_replicas",
    "copy_to_group",
    "fork_rng",
    "full_state_dict",
    "gather_from_group",
    "gather_from_sequence",
    "gpt2_plan",
    "heads",
    "llama_plan",
    "load_full_state_dict",
    "parallelize_module",
    "qkv",
    "reduce_from_group",
    "reduce_scatter_to_sequence",
    "scatter_to_group",
    "split",
    "transformer_plan",
    "vocab_parallel_cross_entropy",
]
