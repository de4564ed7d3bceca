"""Mixed parallelism: data, pipeline and tensor parallelism at once, on a mesh of ranks.

Every rank has a place (d, p, t) in a mesh, and shares a group with the others along each axis:

| axis | of the model it has | what travels along it |
|---|---|---|
| data | the same part | gradients, once a step |
| pipeline | other layers | activations and their gradients, once a micro-batch |
| context | the same part | keys and values, in each layer and micro-batch |
| experts | other experts | rows to experts and back, in each layer and micro-batch |
| tensor | other features | sums of activations, four a block and a micro-batch |

So the ranks along `tensor` belong closest together, and those along `data` may be far apart. The
ranks along `context`, if there are any, share the tokens of each row; those along `experts` have
rows of their own. Both average gradients with those along `data`, of all but the experts. All this
is put together from the lessons before.

Lesson: mixed_parallelism. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM" (arXiv 2104.04473), section 3.

To read, in this order: `naive` is the idea, `mesh_axes` has the mesh and what travels along its
axes, `mixed_parallel` the strategy.
"""

from minidist.mixed.mesh_axes import AXES, mesh, traffic_by_axis
from minidist.mixed.mixed_parallel import MixedParallel

__all__ = ["AXES", "MixedParallel", "mesh", "traffic_by_axis"]
