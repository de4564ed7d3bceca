"""Steps that others have measured, and what the planner would have said of them.

One measured step gives the speed of computing (`planner.calibrated`): it is no prediction. The
others are: for A100s other numbers of ranks, other models, another paper. For H100s each of two
models has a step of its own, and is predicted for more ranks. Lesson: scaling_out
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from minidist.planner import GPUS, MODELS, Device, Layout, Transformer, calibrated, step_time


@dataclass(frozen=True)
class Prediction:
    """Of one step: `measured` and `predicted` seconds."""

    source: str
    what: str
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


@dataclass(frozen=True)
class _Step:
    """A step of a paper: its seconds, and those that a device would take."""

    source: str
    what: str
    seconds: float
    of: Callable[[Device], float]


def predictions() -> Iterator[Prediction]:
    """What was measured, and what is predicted. Lesson: scaling_out"""
    for device, first, others in (
        (GPUS["a100"], _korthikanti("175B"), [_korthikanti("530B"), _korthikanti("1T"), *_smith()]),
        (GPUS["h100"], _llama(8192, 32, 430), [_llama(16384, 16, 400)]),
        (GPUS["h100"], _torchtitan(8, 6667), [_torchtitan(128, 6514)]),
    ):
        same = calibrated(device, first.of, first.seconds)
        for step in others:
            yield Prediction(step.source, step.what, step.seconds, step.of(same))


def _step(
    source: str,
    what: str,
    seconds: float,
    model: Transformer,
    layout: Layout,
    precision: str = "mixed",
) -> _Step:
    def of(device: Device) -> float:
        return step_time(model, layout, device, precision).total

    return _Step(source, what, seconds, of)


def _korthikanti(name: str) -> _Step:
    """Korthikanti et al. (arXiv 2205.05198), Tables 3 and 5: sequence parallel, attention computed
    again. 175B, which calibrates: 13.75 s."""
    sizes, (ranks, pipeline, chunks), seconds = {
        "175B": ((96, 12288, 96), (64, 8, 3), 13.75),
        "530B": ((105, 20480, 128), (280, 35, 3), 37.83),
        "1T": ((128, 25600, 160), (512, 64, 1), 71.49),
    }[name]
    layout = Layout(
        ranks,
        8,
        pipeline,
        micro_batches=ranks,  # one replica; the global batch is as large as the number of ranks
        chunks=chunks,
        sequence_parallel=True,
        stored_attention=True,
        recompute="attention",
    )
    model = Transformer(*sizes, dropout=True)
    return _step("arXiv 2205.05198, Table 5", f"GPT {name}, {ranks} A100", seconds, model, layout)


def _smith() -> Iterator[_Step]:
    """Smith et al. (arXiv 2201.11990), section 2.4: a batch of 1,920, all layers computed again."""
    for ranks, seconds in (2240, 60.1), (2800, 50.2), (3360, 44.4):
        m = 1920 // (ranks // 280)
        layout = Layout(ranks, 8, 35, 0, 1, m, stored_attention=True, recompute="layers")
        what = f"MT-NLG 530B, {ranks:,} A100"
        yield _step("arXiv 2201.11990, §2.4", what, seconds, MODELS["mt-nlg-530b"], layout)


def _llama(ranks: int, m: int, tflops: float) -> _Step:
    """Grattafiori et al. (arXiv 2407.21783), Table 4: 16 million tokens a step, so many TFLOP/s of
    the model's a GPU. 8,192 GPUs calibrate. Its third row is left out: it does not say how it
    counts attention, which is most of its work."""
    model = MODELS["llama-3-405b"]
    layout = Layout(ranks, 8, 16, 1, 1, m, 8, sequence_parallel=True, recompute="elementwise")
    seconds = layout.sequences * model.length * model.flops / (ranks * tflops * 1e12)
    return _step(
        *("arXiv 2407.21783, Table 4", f"Llama 3 405B, {ranks:,} H100", seconds, model, layout),
        precision="megatron",
    )


def _torchtitan(ranks: int, rate: float) -> _Step:
    """torchtitan, benchmarks/llama3_h100_202412, Tables 1 and 3: FSDP with torch.compile, two
    sequences a rank; tokens a second and rank. 8 GPUs calibrate."""
    layout = Layout(ranks, stage=3, micro_batch=2, recompute="operations")
    what, model = f"Llama 3.1 8B, {ranks} H100", MODELS["llama-3-8b"]
    return _step("torchtitan, 2024-12", what, 2 * model.length / rate, model, layout, "autocast")
