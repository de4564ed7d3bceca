"""torch's own context parallel, made to run on a CPU. Lesson: long_sequences.

`torch.distributed.tensor.experimental.context_parallel` of torch 2.13 sends attention round a ring
for kernels of CUDA only. The ring itself takes any kernel. So two handlers are all that is missing:
for torch's flash kernel of the CPU, and for its backward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@contextmanager
def on_cpu() -> Iterator[Any]:
    """Within the block, torch's context parallel has handlers for the CPU. Gives its options, of
    which `convert_to_f32` says that blocks are merged in float32."""
    from torch.distributed.tensor.experimental import _context_parallel

    its: Any = _context_parallel._attention

    def forward(op: Any, args: Any, kwargs: Any) -> tuple[DTensor, ...]:
        q, k, v, _, causal = [*_local(args), 0.0, False][:5]

        def kernel(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
            return FORWARD(q, k, v, 0.0, is_causal)

        group = args[0].device_mesh.get_group()
        found = its._templated_ring_attention(group, 2, kernel, q, k, v, causal)
        return _like(args[0], found[:2])

    def backward(op: Any, args: Any, kwargs: Any) -> tuple[DTensor, ...]:
        dout, q, k, v, out, lse, _, causal = _local(args)

        def kernel(query: Any, key: Any, value: Any, out: Any, logsumexp: Any, **rest: Any) -> Any:
            own = (x.to(query.dtype) for x in (out, logsumexp))
            return BACKWARD(rest["grad_out"], query, key, value, *own, 0.0, rest["is_causal"])

        group, dout = args[1].device_mesh.get_group(), dout.contiguous()
        found = its._templated_ring_attention_backward(
            group, 2, kernel, dout, "grad_out", q, k, v, out, lse, causal
        )
        return _like(args[1], found[:3])

    its.custom_ops |= {FORWARD: forward, BACKWARD: backward}
    try:
        yield its._cp_options
    finally:
        its._cp_options.convert_to_f32 = True  # as torch has it
        for operator in FORWARD, BACKWARD:
            its.custom_ops.pop(operator, None)


def _local(args: Any) -> list[Any]:
    return [x.to_local() if isinstance(x, DTensor) else x for x in args]


def _like(x: DTensor, tensors: Any) -> tuple[DTensor, ...]:
    return tuple(DTensor.from_local(each, x.device_mesh, [Shard(2)]) for each in tensors)
