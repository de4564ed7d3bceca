"""PowerSGD: of each gradient, a matrix, only what two thin matrices can say
(lesson: beyond_gradients).

    state = PowerSGDState(matrix_approximation_rank=2)
    ddp.register_comm_hook(state, power_sgd_hook)

A gradient M (n, m) is sent as P (n, r) and Q (m, r), with M ≈ P Qᵀ: (n + m) r numbers, not n m. One
step of the power method finds them, and goes on from the last step's Q, as gradients change slowly.
Both products are linear in M. So P and Q can be averaged by all_reduce, and are those of the mean
gradient: unlike numbers of few bits, which no all_reduce can add. Vogels, Karimireddy and Jaggi
2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", arXiv
1905.13727, algorithms 1 and 2.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from minidist.averaging.flat_mean import average
from minidist.averaging.hook_state import Remembering, done, require_state


@dataclass
class Memory:
    """Of each matrix, by its place in the bucket: what the last step has left out, and Q."""

    errors: dict[int, torch.Tensor] = field(default_factory=dict)  # (n, m)
    qs: dict[int, torch.Tensor] = field(default_factory=dict)  # (m, r)


class PowerSGDState(Remembering):
    """What `power_sgd_hook` remembers. The arguments are those of torch's class, but not all
    defaults: torch's begins after 1000 backward passes, and needs a process_group.

    process_group: the ranks of the DistributedDataParallel; None is the default group.
    matrix_approximation_rank: r. A gradient with two axes or more is a matrix, its first axis
        against all others; where (n + m) r numbers would not be fewer, it is sent as it is.
    start_powerSGD_iter: the first so many backward passes average the gradients as they are.
    use_error_feedback: add what was left out to the next gradient.
    warm_start: begin with the last step's Q, not with a random one.
    random_seed: of the first Q, which must be the same on every rank.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 0,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        random_seed: int = 0,
    ) -> None:
        super().__init__(process_group, use_error_feedback)
        rank = matrix_approximation_rank
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"matrix_approximation_rank must be 1 or more, not {rank!r}")
        self.rank, self.warm_start = rank, warm_start
        self.start, self.iter = start_powerSGD_iter, 0
        self._random = torch.Generator().manual_seed(random_seed)

    def first_q(self, matrix: torch.Tensor) -> torch.Tensor:
        """A random (m, r) for a matrix (n, m)."""
        rank = min(*matrix.shape, self.rank)
        q = torch.randn(matrix.shape[1], rank, dtype=matrix.dtype, generator=self._random)
        return q.to(matrix.device)


def power_sgd_hook(
    state: PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients by two all_reduces, of all P and what is no matrix, and of all Q.
    Waits for both, as `int8_hook` does. A gradient of 16 bits is multiplied in float32, and one of
    complex numbers is sent as it is."""
    require_state(state, PowerSGDState)
    flat, group = bucket.buffer(), state.process_group  # (n,)
    late = state.iter >= state.start
    state.iter += bucket.is_last()
    if not late:
        average([flat], group)
        return done(flat)
    memory: Memory = state.kept(bucket, Memory)
    gradients = bucket.gradients()
    matrices = {i: _matrix(g) for i, g in enumerate(gradients) if _worth(state, g)}  # (n, m)
    if not state.use_error_feedback:
        memory.errors = {}
    for i, error in memory.errors.items():
        matrices[i] += error
    if not (state.warm_start and memory.qs):
        memory.qs = {i: state.first_q(matrix) for i, matrix in matrices.items()}

    ps = {i: matrix @ memory.qs[i] for i, matrix in matrices.items()}  # (n, r)
    as_they_are = [g for i, g in enumerate(gradients) if i not in matrices]
    average([*ps.values(), *as_they_are], group)
    ps = {i: torch.linalg.qr(p).Q for i, p in ps.items()}  # orthonormal columns
    memory.qs = {i: matrix.T @ ps[i] for i, matrix in matrices.items()}  # (m, r)

    if state.use_error_feedback:  # what this rank has sent is P Qᵀ, with its own Q
        for i, matrix in matrices.items():
            memory.errors[i] = (matrix - ps[i] @ memory.qs[i].T).nan_to_num_(0, 0, 0)
    average(list(memory.qs.values()), group)
    for i, p in ps.items():
        gradients[i].copy_((p @ memory.qs[i].T).view(gradients[i].shape))
    if not all(q.isfinite().all() for q in memory.qs.values()):  # an overflow: every rank has it
        memory.qs = {}
    return done(flat)


def _matrix(gradient: torch.Tensor) -> torch.Tensor:
    """Its first axis against all others, (n, m), in 32 bits or more."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return gradient.flatten(1).to(wide)


def _worth(state: PowerSGDState, gradient: torch.Tensor) -> bool:
    """Whether P and Q are fewer numbers than the matrix."""
    if gradient.dim() < 2 or gradient.is_complex():
        return False
    n, m = gradient.flatten(1).shape
    return (n + m) * min(n, m, state.rank) < n * m
