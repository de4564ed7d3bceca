"""The planner against trainings that others have published: seconds a step within 25 %, bytes at
the peak within 10 %. Where it is further off, the reason stands here, and on the planner's page.
The runs stand in notebooks/scripts/published_runs.py, which the lesson scaling_out shows.
"""

import math
import runpy
from dataclasses import replace
from functools import partial

import pytest
from programs import HERE

from minidist.instruments import planner, tracing
from minidist.instruments.planner import GPUS, Layout
from minidist.instruments.planner.advice import ERROR, fits
from minidist.instruments.planner.page import page, sources

GIB = 2**30
A100, H100 = GPUS["a100"], GPUS["h100"]
RUNS = runpy.run_path(str(HERE / "notebooks" / "scripts" / "published_runs.py"))
STEPS, OF_KORTHIKANTI, ratio = RUNS["STEPS"], RUNS["OF_KORTHIKANTI"], RUNS["ratio"]
WITH_EXPERTS = RUNS["WITH_EXPERTS"]
TITAN, FSDP_TP = RUNS["TITAN"], RUNS["FSDP_TP"]
L8, L70, L405 = RUNS["L8"], RUNS["L70"], RUNS["L405"]

# Further off than 25 %: predicted / published, and why.
DEEPSPEED = "ZeRO-3 of 2021: 3 × 350 GB through a rank's own card of 25 GB/s would take 42 s, not 7"
OFF = {
    "GPT-3, ZeRO-3, 768": (0.48, DEEPSPEED),
    "GPT-3, ZeRO-3, 1,536": (0.24, DEEPSPEED),
    "8B, 8 B200": (0.46, "cards with a limit on their power, the page says"),
}
SMALL = "128 experts of 768 to 1,536: small products, and rows that are sorted, take longer"
OFF_OF_EXPERTS = {
    "Qwen3 30B, 8": (0.63, SMALL),
    "Qwen3 30B, 8, not once": (0.46, SMALL),
    "Qwen3 30B, 128": (0.59, SMALL),
    "Qwen3 235B, pipeline 32": (0.58, SMALL),
    "Qwen3 235B, tensor 4": (0.46, SMALL),
    "Qwen3 235B, FSDP": (
        1.50,
        "here gradients travel with each micro-batch; of theirs it is not said",
    ),
    "DeepSeek-V3, 2,048 H800": (1.32, "DualPipe hides all_to_alls, whose rows go out in 8 bits"),
}


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


def test_the_published_steps_with_experts():
    """Large experts on one node are near, and all_to_alls between nodes. Small ones are not."""
    assert apart({name: ratio(name) for name in WITH_EXPERTS}, 0.25, OFF_OF_EXPERTS) == {}
    layout = WITH_EXPERTS["Mixtral 8x7B, 64"][2]
    said = " ".join(sources(layout, H100, optimizer="adam", precision="mixed").split())
    every = sorted(map(ratio, WITH_EXPERTS))
    near = sum(abs(each - 1) <= ERROR for each in every)
    assert f"{near} of {len(every)} published steps are as near as above" in said
    assert f"planned at {every[0]:.2f} to {every[-1]:.2f} times what they took" in said
    # DeepSeek-V3, 14.8 trillion tokens: 2.664 of its 2.788 million hours.
    _, shape, deepseek, *_ = WITH_EXPERTS["DeepSeek-V3, 2,048 H800"]
    took = planner.step_time(shape, deepseek, H100, "float8")
    steps = 14.8e12 / (deepseek.sequences * shape.length)
    hidden, shown = (
        steps * each * 2048 / 3600 / 1e6 for each in (took.total - took.experts, took.total)
    )
    assert hidden < 2.664 < shown


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
        _, shape, layout, *_ = STEPS[f"{name}, selective"]
        assert RUNS["mfu"](f"{name}, selective") == pytest.approx(utilisation, abs=0.0017)
        assert planner.peak(shape, layout).total < 80e9


def test_the_formula_of_tracing_counts_the_same():
    for shape in L8, L70, L405:
        norms = (2 * shape.layers + 1) * shape.width
        weights = shape.parameters - norms - shape.vocabulary * shape.width  # but one is looked up
        sizes = shape.layers, shape.attention_width, shape.length
        assert tracing.model_flops(weights, 5, *sizes) == 5 * shape.flops


def test_a_source_that_counts_the_embedding():
    """torchtitan's page of 2024 has the table in N, though it is only looked up."""
    for name, published in {"8B, 64 A100": 0.582, "70B, 64 A100": 0.517}.items():
        shape, found = STEPS[name][1], RUNS["mfu"](name)
        more = 1 + 6 * shape.vocabulary * shape.width / shape.flops
        assert found * more == pytest.approx(published, abs=0.0006)
    assert RUNS["mfu"]("8B, 64 A100") == pytest.approx(0.552, abs=0.0006)  # `planner.mfu` says so


# Iterations a second of attention alone, forward and backward: 8,192 tokens on one GPU; a ring of
# eight times as many on eight (README of zhuzilin/ring-flash-attention, "batch api").
RINGS = {"8 H800": (H100, 154.7, 10.4), "8 A100": (A100, 94.7, 6.2)}


def test_a_ring_whose_cut_is_contiguous():
    """53.9 and 52.5 %: the last rank computes 2 - 1/8 of the mean, and 8/15 is 53.3 %. Its zigzag
    reaches 90 %, of which the planner, which knows no small blocks and no merging, says nothing."""
    shape = replace(L8, layers=1, length=8 * 8192)
    for name, (device, alone, ring) in RINGS.items():
        layout = Layout(8, context=8, context_attention="ring")
        mean, last, rest = (
            planner.step_time(shape, each, gpu)
            for each, gpu in (
                (layout, device),
                (replace(layout, context_cut="contiguous"), device),
                (layout, replace(device, attention=math.inf)),
            )
        )
        planned = (mean.compute - rest.compute) / (last.compute - rest.compute + last.context)
        assert planned == pytest.approx(8 / 15, abs=0.005), name
        assert planned == pytest.approx(ring / (alone / 8), abs=0.01), name


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
