"""Steps of trainings that others have published, beside the planner's.

    python published_runs.py

Of each kind of GPU, one number is fitted to these runs, `utilisation`; of all, `float8`. All else
is as published; what a source leaves open is noted. Runs with experts stand apart, and nothing is
fitted to them. Lessons: scaling_out, experts.
"""

from dataclasses import replace
from functools import partial

from minidist.instruments import planner
from minidist.instruments.planner import GPUS, MODELS, Layout, Transformer

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
META = partial(META, recompute="elementwise")  # see tests/test_published_runs.py
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
        BRIDGE,
        L8,
        Layout(8, stage=3, micro_batches=16),
        H100,
        "float8",
        rate(14079),
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
# Routing is even by force in torchtitan's runs and Bridge's; of Megatron's and the zoo's it is not
# said. DeepSeek's is real, on H800, whose NVLink is slower than that of the H100, which is planned.
TITAN_EP = "torchtitan, distributed/deepep/README.md and qwen3_30b_a3b_with_deepep.toml"
MEGATRON_EP = "Megatron-LM, moe/README.md: 468 TFLOP/s of v0.9 in the layout of v0.8"
ZOO = "Megatron-MoE-ModelZoo, best_practice/Qwen3"
V3 = "arXiv 2412.19437, sections 1, 3.2 and 4.2: 180,000 hours a trillion tokens; micro-batch of 1"
_M7, _Q30, _Q235, _V3 = (
    MODELS[name] for name in ("mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3")
)
_EP8 = {"experts": 8, "once": True}
_FULL = partial(FSDP, micro_batch=8, **LAYERS | _EP8)
WITH_EXPERTS = {
    "Mixtral 8x7B, 64": (
        *(MEGATRON_EP, _M7, Layout(64, 1, 4, 1, 1, 16, 8, experts=8)),
        *(H100, "megatron", tflops(468)),
    ),
    "Qwen3 30B, 8": (TITAN_EP, _Q30, _FULL(8), B200, "autocast", rate(14796)),
    "Qwen3 30B, 8, not once": (
        *(TITAN_EP, _Q30, _FULL(8, once=False), B200, "autocast", rate(9930)),
    ),
    "Qwen3 30B, 128": (TITAN_EP, _Q30, _FULL(128), B200, "autocast", rate(13856)),
    **{
        f"Qwen3 235B, {name}": (ZOO, _Q235, layout, H100, "megatron", seconds(took))
        for name, layout, took in (
            (
                "experts 32",
                ZERO_1(
                    *(256, 2, 8),
                    **{"micro_batches": 128, "chunks": 4, "recompute": "elementwise"},
                    **{"experts": 32, "once": True},
                ),
                19.7,
            ),
            (
                "pipeline 32",
                ZERO_1(
                    *(256, 2, 32),
                    **{"micro_batches": 512, "chunks": 3, "recompute": "elementwise"},
                    experts=8,
                ),
                24.2,
            ),
            ("tensor 4", ZERO_1(256, 4, 8, micro_batches=256, chunks=4, **_EP8), 29.0),
            (
                "FSDP",
                ZERO_1(256, 2, stage=3, micro_batch=4, micro_batches=4, **LAYERS | _EP8),
                17.6,
            ),
        )
    },
    "DeepSeek-V3, 1,024 H100": (
        BRIDGE,
        _V3,
        ZERO_1(1024, 2, 8, micro_batches=128, chunks=4, experts=64, once=True),
        *(H100, "float8", rate(1297)),
    ),
    "DeepSeek-V3, 2,048 H800": (
        *(V3, _V3),
        Layout(2048, 1, 16, 1, 1, 120, recompute="elementwise", experts=64, once=True),
        *(H100, "float8", rate(1e12 / (180e3 * 3600))),
    ),
}


def ratio(name, gpu=None):
    """What the planner says, beside what was published."""
    _, model, layout, device, precision, took = (STEPS | WITH_EXPERTS)[name]
    return planner.step_time(model, layout, gpu or device, precision).total / took(model, layout)


def mfu(name):
    """Model FLOPs utilisation, of the time that was published: what `planner.mfu` counts, whatever
    the source's own MFU counts."""
    _, model, layout, device, _, took = (STEPS | WITH_EXPERTS)[name]
    return planner.mfu(model, layout, device, took(model, layout))


def draw():
    """Planned / published time of each of STEPS; those further off than a quarter have names."""
    from minidist.instruments.plot import color, palette
    from minidist.instruments.plot.frame import chart

    with chart(None, f"{len(STEPS)} published steps", 9, 3.6) as ax:
        for label, shade in ("within a quarter", "ring"), ("further off", "communication"):
            off = label == "further off"
            names = [name for name in STEPS if (abs(ratio(name) - 1) > 0.25) == off]
            dots = [STEPS[name][2].world_size for name in names], [ratio(name) for name in names]
            ax.plot(*dots, "o", color=color(shade), alpha=0.7, label=label)
            for name, gpus, found in zip(names, *dots, strict=True) if off else ():
                ax.annotate(name, (1.12 * gpus, found), va="center", size=9)
        for level in 0.75, 1, 1.25:
            ax.axhline(level, color=palette.PALE, lw=0.8, ls="-" if level == 1 else ":")
        ax.set(xlabel="GPUs", ylabel="planned / published time", xscale="log", ylim=(0, 1.5))
        ax.set_xticks([4, 64, 1024, 16384], ["4", "64", "1,024", "16,384"])
        ax.minorticks_off()
        ax.legend(loc="lower left")
    return ax


if __name__ == "__main__":
    for name, (source, *_) in (STEPS | WITH_EXPERTS).items():
        print(f"{name:34} MFU {mfu(name):4.0%}, planned / published {ratio(name):.2f}  {source}")
