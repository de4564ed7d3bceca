"""Feature splitting, also called tensor parallelism. One layer, computed by many ranks.

All ranks see the same batch, and each has a part of every large weight. To read, in this order:

    naive        the idea: two layers, and one all_reduce each way
    operators    how tensors enter and leave a region that ranks compute apart
    layers       linear layers split by columns and by rows, embedding, queries with keys and values
    plan         any model, by the names of its parts
    loss         of logits that are split by vocabulary
    model        a whole model: its layers replaced, its parameters DTensors, its state joined

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism" (arXiv 1909.08053). Lesson: feature_splitting. For vocabulary, dropout and
sequence parallel: lesson: sequence_parallel.
"""

from minidist.tensor_parallel.layers import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelLinear,
    fork_rng,
)
from minidist.tensor_parallel.loss import vocab_parallel_cross_entropy
from minidist.tensor_parallel.model import (
    check_replicas,
    full_state_dict,
    load_full_state_dict,
    parallelize_module,
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
from minidist.tensor_parallel.plan import heads, qkv, transformer_plan

__all__ = [
    "ColumnParallelLinear",
    "QKVParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelLinear",
    "check_replicas",
    "copy_to_group",
    "fork_rng",
    "full_state_dict",
    "gather_from_group",
    "gather_from_sequence",
    "heads",
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
