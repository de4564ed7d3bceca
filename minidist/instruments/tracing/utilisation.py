"""Which part of a device's operations a model needs (lesson: reading_a_step)."""


def model_flops(
    weights: float, tokens: float, layers: int = 0, width: int = 0, length: int = 0
) -> float:
    """Operations of a training step: 6 a weight and token, and 12 · layers · length · width a token
    for attention, forward and backward. Lesson: reading_a_step.

    weights: those that multiply tokens. An embedding that is only looked up does not, but some
    sources count it. tokens: of the step. width: of all heads together. length: of a sequence.

    After Chowdhery et al., "PaLM" (arXiv 2204.02311), appendix B: attention counts whole, not its
    causal half, and nothing that is computed again.
    """
    return (6 * weights + 12 * layers * length * width) * tokens


def mfu(flops: float, seconds: float, peak: float) -> float:
    """Model FLOPs utilisation: the part of what devices of `peak` FLOP/s, all together, could do in
    these seconds that the model needed (`model_flops`). With the operations that were done, those
    that were computed again among them, it is HFU, hardware FLOPs utilisation. Lesson:
    reading_a_step."""
    return flops / seconds / peak
