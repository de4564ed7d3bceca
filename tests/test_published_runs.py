"""The planner against trainings that others have published: seconds a step within 25 %, bytes at
the peak within 10 %. Where it is further off, the reason stands here, and on the planner's page.

Of each kind of GPU, one number is fitted to these runs, `utilisation`; of all, `float8`. All else
is as published; what a source leaves open is noted. Not here: DeepSeek-V3 (arXiv 2412.19437), whose
experts the planner refuses.
"""

from dataclasses import replace
from functools import partial

import pytest

from minidist import planner
from minidist.planner import GPUS, MODELS, Layout, Transformer
from minidist.planner.advice import ERROR, fits
from minidist.planner.page import page, sources

GIB = 2**30
A100, H100, H200, B200, TITAN = GPUS.values()

L8, L70, L405 = (MODELS[f"llama-3-{size}"] for size in ("8b", "70b", "405b"))
GPT_3 = replace(MODELS["gpt-3-175b"], dropout=True)
NEMOTRON = partial(Transformer, length=4096, vocabulary=256000, kv_heads=8, tied=False)
MEGATRON = partial(Transformer, length=4096, vocabulary=131072, tied=False)
FSDP = partial(Layout, stage=3, recompute="operations")
FSDP_TP = partial(FSDP, tensor=8, sequence_parallel=True)
# A torch pipeline keeps the units; 8 micro-batches, as its stages, give the ratio of the schedules.
FSDP_TP_PP = partial(FSDP_TP, pipeline=8, reshard_after_forward=False, micro_batches=8)
LAYERS = {"recompute": "layers"}
# Interleaved; ends without a layer, so 128 pieces of a layer or none.
META = partial(Layout, tensor=8, pipeline=16, stage=1, chunks=8, sequence_parallel=True)
META = partial(META, recompute="elementwise")  # see test_the_published_layout_of_405b_fits
ZERO_1 = partial(Layout, stage=1, sequence_parallel=True)


def rate(tokens):
    """Seconds of a step in which a GPU has so many tokens a second."""
    return lambda model, layout: layout.sequences * model.length / layout.world_size / tokens


def tflops(number):
    """Of the model's own operations, a GPU and second; attention counted whole."""
    return lambda model, layout: rate(1e12 * number / model.flops)(model, layout)


def seconds(number):
    return lambda model, layout: number


def long(model, length):
    return replace(model, length=length)


TITAN_2412 = "torchtitan, benchmarks/llama3_h100_202412"
TITAN_2506 = "torchtitan, benchmarks/asyncTP_llama3_h100_2025-06"
TITAN_DOCS = "torchtitan, docs/performance.md before December 2024"
KORTHIKANTI = "arXiv 2205.05198, Tables 3 and 5"
SMITH = "arXiv 2201.11990, section 2.4"
LLAMA_3 = "arXiv 2407.21783, Table 4"
NEMOTRON_15 = "arXiv 2402.16819, Table 2"  # micro-batch of 2: not said
README = "Megatron-LM, README; micro-batch of 1 and interleaved: not said"
NARAYANAN = "arXiv 2104.04473, Table 2"
BRIDGE = "Megatron-Bridge, performance-summary-archive.md, 25.09"

# name: (source, model, layout, GPU, precision, how long a step took)
STEPS = {
    "8B, 8 H100": (TITAN_2412, L8, FSDP(8, micro_batch=2), TITAN, "autocast", rate(6667)),
    "8B, 8, eager": (TITAN_2412, L8, FSDP(8, micro_batch=2), TITAN, "autocast", rate(5762)),
    "8B, 8, float8": (TITAN_2412, L8, FSDP(8, micro_batch=2), TITAN, "float8", rate(8532)),
    "8B, 128": (TITAN_2412, L8, FSDP(128, micro_batch=2), TITAN, "autocast", rate(6514)),
    "8B, 128, eager": (TITAN_2412, L8, FSDP(128, micro_batch=2), TITAN, "autocast", rate(5605)),
    "8B, 128, float8": (TITAN_2412, L8, FSDP(128, micro_batch=2), TITAN, "float8", rate(8380)),
    **{
        f"8B, context {c}": (
            *(TITAN_2412, long(L8, 32768 * c), FSDP(8, context=c, **LAYERS)),
            *(TITAN, "float8", rate(tokens)),
        )
        for c, tokens in ((1, 3890), (2, 2540), (4, 1071), (8, 548))
    },
    "70B, 256, float8": (
        *(TITAN_2412, L70, FSDP_TP(256, micro_batch=16, **LAYERS)),
        *(TITAN, "float8", rate(829)),
    ),
    "70B, 256": (
        *(TITAN_2506, L70, FSDP_TP(256, micro_batch=16, **LAYERS)),
        *(TITAN, "autocast", rate(597)),
    ),
    "8B, 64": (TITAN_2506, L8, FSDP_TP(64, micro_batch=12), TITAN, "autocast", rate(4378)),
    "405B, 512, 1F1B": (
        *(TITAN_2412, L405, FSDP_TP_PP(512, micro_batch=4, **LAYERS)),
        *(TITAN, "float8", rate(100)),
    ),
    "405B, 512, interleaved": (
        *(TITAN_2412, L405, FSDP_TP_PP(512, micro_batch=4, chunks=2, **LAYERS)),
        *(TITAN, "float8", rate(128)),
    ),
    **{
        f"405B, 512, context {c}": (
            *(TITAN_2412, long(L405, 32768 * c), FSDP_TP_PP(512, context=c, **LAYERS)),
            *(TITAN, "float8", rate(tokens)),
        )
        for c, tokens in ((1, 76), (2, 47), (4, 31), (8, 16))
    },
    "405B, 128": (
        *(TITAN_DOCS, L405, FSDP_TP(128, micro_batch=2, **LAYERS), TITAN, "autocast", rate(109)),
    ),
    "8B, 64 A100": (TITAN_DOCS, L8, FSDP(64), A100, "autocast", rate(2973)),
    "70B, 64 A100": (TITAN_DOCS, L70, FSDP(64, **LAYERS), A100, "autocast", rate(331)),
    "8B, 8 H100, one sequence": ("torchao", L8, FSDP(8), TITAN, "autocast", rate(6150)),
    "8B, 8 B200": ("torchtitan, mxfp8.md", L8, FSDP(8), B200, "autocast", rate(8307)),
    "405B, 8,192": (LLAMA_3, L405, META(8192, micro_batches=32), H100, "megatron", tflops(430)),
    "405B, 16,384": (LLAMA_3, L405, META(16384, micro_batches=16), H100, "megatron", tflops(400)),
    "405B, context 16": (
        *(LLAMA_3, long(L405, 131072), META(16384, context=16, micro_batches=16)),
        *(H100, "megatron", tflops(380)),
    ),
    **{
        f"Nemotron 15B, {n:,}": (
            *(NEMOTRON_15, NEMOTRON(32, 6144, 48), ZERO_1(n, 8, micro_batch=2, micro_batches=2)),
            *(H100, "megatron", seconds(took)),
        )
        for n, took in ((768, 0.57), (1536, 0.58), (2304, 0.64))
    },
    "Nemotron 340B, 6,144": (
        *("aiportalx", NEMOTRON(96, 18432, 96), ZERO_1(6144, 8, 12, micro_batches=36, chunks=8)),
        *(H100, "megatron", seconds(8.0)),
    ),
    **{
        f"GPT {name}, {n:,}": (
            *(README, MEGATRON(*shape), ZERO_1(n, t, p, micro_batches=m, chunks=v)),
            *(H100, "megatron", tflops(reached)),
        )
        for name, shape, n, t, p, v, m, reached in (
            ("7.1B", (30, 4096, 32), 96, 2, 1, 1, 4, 466),
            ("70B", (84, 8192, 64), 768, 8, 2, 2, 8, 420),
            ("177B", (96, 12288, 96), 2304, 8, 6, 4, 24, 433),
            ("462B", (112, 18432, 144), 6144, 8, 16, 7, 64, 460),
        )
    },
    **{
        f"GPT-3, ZeRO-3, {n:,}": (
            *(NARAYANAN, GPT_3, Layout(n, stage=3, micro_batch=b, stored_attention=True, **LAYERS)),
            *(A100, "mixed", seconds(took)),
        )
        for n, b, took in ((384, 4, 81.6), (768, 2, 66.7), (1536, 1, 66.7))
    },
    **{
        f"GPT-3, tensor and pipeline, {n:,}": (
            *(NARAYANAN, GPT_3, Layout(n, 8, 12, 0, 1, m, stored_attention=True, **LAYERS)),
            *(A100, "mixed", seconds(took)),
        )
        for n, m, took in ((384, 384, 76.8), (768, 192, 39.4), (1536, 96, 20.8))
    },
    "8B, 4 H200": (
        *("KempnerForge, mfu_scaling.md", long(L8, 4096)),
        Layout(4, stage=3, micro_batch=4, micro_batches=2),
        *(H200, "bfloat16", rate(9746)),
    ),
    "8B, 8, Bridge": (
        *(BRIDGE, L8, Layout(8, stage=3, micro_batches=16), H100, "float8", rate(14079)),
    ),
    "8B, 8 B200, Bridge": (
        *(BRIDGE, L8, Layout(8, stage=1, micro_batches=16), B200, "float8", rate(29994)),
    ),
    "70B, 64, Bridge": (
        *(BRIDGE, L70, ZERO_1(64, 4, 8, micro_batches=64, chunks=5), H100, "float8", rate(1619)),
    ),
    **{
        f"MT-NLG 530B, {n:,}": (
            *(SMITH, MODELS["mt-nlg-530b"]),
            Layout(n, 8, 35, 0, 1, 1920 // (n // 280), stored_attention=True, **LAYERS),
            *(A100, "mixed", seconds(took)),
        )
        for n, took in ((2240, 60.1), (2800, 50.2), (3360, 44.4))
    },
}
# Layers, width, heads; ranks, tensor, pipeline, chunks, micro-batch, global batch; seconds with all
# recomputed; with sequence parallel and attention recomputed; and that one's MFU.
OF_KORTHIKANTI = {
    "22B": ((48, 6144, 64), (8, 8, 1, 1, 4, 4), 1.42, 1.10, 0.415),
    "175B": ((96, 12288, 96), (64, 8, 8, 3, 1, 64), 18.13, 13.75, 0.514),
    "530B": ((105, 20480, 128), (280, 8, 35, 3, 1, 280), 49.05, 37.83, 0.560),
    "1T": ((128, 25600, 160), (512, 8, 64, 1, 1, 512), 94.42, 71.49, 0.563),
}
for _name, (_sizes, (_N, _t, _p, _v, _b, _batch), _full, _selective, _) in OF_KORTHIKANTI.items():
    _shape = Transformer(*_sizes, dropout=True)
    _plain = Layout(_N, _t, _p, 0, _b, _batch // _b, _v, stored_attention=True)
    _both = replace(_plain, sequence_parallel=True, recompute="attention")
    _again = replace(_plain, recompute="layers")
    _rest = A100, "mixed"
    STEPS[f"{_name}, full"] = KORTHIKANTI, _shape, _again, *_rest, seconds(_full)
    STEPS[f"{_name}, selective"] = KORTHIKANTI, _shape, _both, *_rest, seconds(_selective)

# Further off than 25 %: predicted / published, and why.
DEEPSPEED = "ZeRO-3 of 2021: 3 × 350 GB through a rank's own card of 25 GB/s would take 42 s, not 7"
OFF = {
    "GPT-3, ZeRO-3, 768": (0.48, DEEPSPEED),
    "GPT-3, ZeRO-3, 1,536": (0.24, DEEPSPEED),
    "8B, 8 B200": (0.46, "cards with a limit on their power, the page says"),
}


def ratio(name, gpu=None):
    _, model, layout, device, precision, took = STEPS[name]
    return planner.step_time(model, layout, gpu or device, precision).total / took(model, layout)


def apart(found, tolerance, off):
    """Those whose planned / published is not nearly 1, or not what `off` says."""
    wanted = {name: (off[name][0], 0.02) if name in off else (1, tolerance) for name in found}
    return {
        name: f"{found[name]:.3f}, not {expected} ± {nearly}"
        for name, (expected, nearly) in wanted.items()
        if found[name] != pytest.approx(expected, abs=nearly)
    }


def test_the_published_steps():
    assert len(STEPS) > 50
    assert apart({name: ratio(name) for name in STEPS}, 0.25, OFF) == {}


def test_what_the_page_says_of_its_errors():
    layout = Layout(1024, stage=3)
    said = " ".join(page("8B", L8, layout, H100, 3, optimizer="adam", precision="mixed").split())
    assert f"A step takes {planner.step_time(L8, layout, H100).total:.3g} s ± {ERROR:.0%}" in said
    assert f"± {ERROR:.0%}: as near are" in said
    for preset, device in GPUS.items():
        own = [name for name in STEPS if STEPS[name][3] == device]
        near = sum(abs(ratio(name) - 1) <= ERROR for name in own)
        assert f"{near} of {len(own)} on {preset}" in said.replace("published steps ", ""), preset
    off = sum(abs(ratio(name, H100) - 1) > ERROR for name in own)
    assert preset == "h100-500w" and f"by h100, {off} of its {len(own)} steps are" in said
    peaks = sorted(map(share, PEAKS))
    near = sum(abs(each - 1) <= 0.1 for each in peaks)
    words = f"{1 - peaks[0]:.0%} below to {peaks[-1] - 1:.0%} above"
    assert f"{near} of {len(peaks)} published peaks are within 10%, the others {words}" in said
    slower = [1 / OFF[name][0] for name in OFF if "ZeRO-3" in name]
    assert f"A100, took {min(slower):.1f} to {max(slower):.1f} times as long" in said
    of_adam = partial(sources, device=H100, optimizer="adam", precision="mixed")
    said = " ".join(of_adam(FSDP_TP(256)).split())
    more = 1 / share("70B, 256, float8")
    assert f"torchtitan's 70B took {more:.2f} times the memory that is planned" in said
    said = " ".join(of_adam(Layout(512, 8, 8, stage=3, micro_batches=8)).split())
    more = [1 / share(name) for name in PEAKS if "405B" in name]
    assert f"took {min(more):.1f} to {max(more):.1f} times the memory" in said


def test_what_korthikanti_counts():
    """The model's own operations, to the last digit of the utilisation; and that it fits 80 GB."""
    for name, (*_, utilisation) in OF_KORTHIKANTI.items():
        _, shape, layout, *_, took = STEPS[f"{name}, selective"]
        found = layout.sequences * shape.length * shape.flops
        found /= took(shape, layout) * layout.world_size * A100.flops
        assert found == pytest.approx(utilisation, abs=0.0017)
        assert planner.peak(shape, layout).total < 80e9


# ---- memory -----------------------------------------------------------------------------------

# GiB at the peak: "reserved", that is with what torch's allocator keeps.
PEAKS = {
    "8B, 8 H100": 77.0,
    "8B, 8, eager": 82.4,
    "8B, 8, float8": 76.8,
    "8B, 128": 62.0,
    "8B, 128, eager": 67.0,
    "8B, 128, float8": 61.8,
    "8B, context 1": 83.9,
    "8B, context 2": 84.2,
    "8B, context 4": 84.0,
    "8B, context 8": 84.5,
    "405B, 512, interleaved": 72.7,
    "8B, 8 H100, one sequence": 47.65,  # "GB"
    "70B, 256, float8": 71.9,
    "405B, 512, 1F1B": 82.5,
    "405B, 512, context 1": 75.3,
    "405B, 512, context 2": 75.9,
    "405B, 512, context 4": 77.1,
    "405B, 512, context 8": 84.9,
    "8B, 4 H200": 61.1,
    "8B, 8 B200": 33.71,
}
# What the planner leaves out in these pipelines, we do not know.
PIPELINE = "FSDP in torch's pipelines, 1F1B; interleaved it is nearer, though more is in flight"
OFF_BY = {  # planned / published
    "70B, 256, float8": (0.74, "see test_what_tensor_parallel_of_torch_takes_more"),
    "405B, 512, 1F1B": (0.77, PIPELINE),
    "405B, 512, context 1": (0.85, PIPELINE),
    "405B, 512, context 2": (0.84, PIPELINE),
    "405B, 512, context 4": (0.83, PIPELINE),
    "405B, 512, context 8": (0.75, PIPELINE),
    "8B, 4 H200": (2.09, "allocated, not reserved; its loss and what it recomputes are not said"),
    "8B, 8 B200": (1.44, "a loss in 16 bits or in pieces, perhaps: without logits it is 1.04"),
}


def share(name):
    _, model, layout, _, precision, _ = STEPS[name]
    return planner.peak(model, layout, precision=precision).total / GIB / PEAKS[name]


def test_the_published_peaks():
    assert apart({name: share(name) for name in PEAKS}, 0.10, OFF_BY) == {}


def test_sixteen_times_as_many_ranks_have_smaller_states():
    less, published = (
        made("8B, 8, eager") - made("8B, 128, eager")
        for made in (lambda name: share(name) * PEAKS[name], PEAKS.get)
    )
    assert less == pytest.approx(published, rel=0.10)


def test_the_published_layout_of_405b_fits():
    """Meta trained it on cards of 80 GB "without activation checkpointing", parameters "not
    resharded after forward", gradients summed in float32 (arXiv 2407.21783, section 3.3.2). As
    eager torch keeps activations it does not fit, for an interleaved schedule holds 141 layers of
    micro-batches. It does if the results of norms and of SwiGLU are not kept. How much memory it
    took, and which tensors were freed early, was not published."""
    of_megatron = partial(fits, L405, device=H100, optimizer="adam", precision="megatron")
    for name in "405B, 8,192", "405B, 16,384":
        layout = STEPS[name][2]
        assert of_megatron(layout)
        assert not of_megatron(replace(layout, recompute="nothing"))
    assert 128 < 8 * STEPS["405B, 8,192"][2].in_flight(1) == 141
