"""`python -m minidist plan`: the planner's page, by flags. Lesson: zero."""

import argparse
from dataclasses import replace

from minidist.instruments.link import Link
from minidist.instruments.planner.device import GPUS, LATENCY_US, Device
from minidist.instruments.planner.layout import RECOMPUTE, Layout
from minidist.instruments.planner.model_states import OPTIMIZERS, PRECISIONS, STAGES
from minidist.instruments.planner.page import page
from minidist.instruments.planner.transformer import MODELS, Transformer, named

SIZES = "layers", "width", "heads", "kv_heads", "hidden", "length", "vocabulary"


def add(sub: argparse.ArgumentParser) -> None:
    """The options."""
    sub.add_argument("--model", help=", ".join(k for k, of in MODELS.items() if not of.experts))
    sub.add_argument("--gpu", default="h100", choices=GPUS, help="what a rank is (h100)")
    sub.add_argument("--optimizer", default="adam", choices=OPTIMIZERS)
    sub.add_argument("--precision", default="mixed", choices=PRECISIONS)
    shape = sub.add_argument_group("a model of your own, or what differs from --model")
    for name in SIZES:
        shape.add_argument(f"--{name.replace('_', '-')}", type=int)
    shape.add_argument("--llama", action="store_true", help="gated MLP, RMS norms, no biases")
    lay = sub.add_argument_group("how it is laid out")
    for name, help in {
        "world-size": "ranks (1, as all of these)",
        "tensor": "ranks that share each layer",
        "context": "ranks that share each sequence",
        "pipeline": "stages",
        "micro-batch": "sequences at once",
        "chunks": "of a pipeline rank: interleaved",
        "replicate": "copies of ZeRO-3's shards: hybrid sharding",
    }.items():
        lay.add_argument(f"--{name}", type=int, default=1, help=help)
    lay.add_argument("--micro-batches", type=int, help="of a step (1; 4 a stage in a pipeline)")
    lay.add_argument("--stage", type=int, choices=STAGES, help="of ZeRO (what fits first)")
    lay.add_argument("--sequence-parallel", action="store_true")
    lay.add_argument("--stored-attention", action="store_true", help="no flash attention")
    lay.add_argument(
        "--no-reshard-after-forward", dest="reshard_after_forward", action="store_false"
    )
    again = "norms and activation functions; stored scores; torchtitan's selective; layers"
    lay.add_argument("--recompute", default=RECOMPUTE[0], choices=RECOMPUTE, help=again)
    gpu = sub.add_argument_group("what differs from --gpu")
    gpu.add_argument("--memory", type=float, metavar="GB")
    gpu.add_argument("--flops", type=float, help="peak of operations a second, such as 989e12")
    gpu.add_argument("--utilisation", type=float, help="the part of them that is reached")
    gpu.add_argument("--gbps", type=float, nargs="+", help="a rank's, Gb/s: in a node, to others")

    def run(given: argparse.Namespace) -> None:
        try:
            print(_answer(given))
        except ValueError as error:
            sub.error(str(error))

    sub.set_defaults(run=run)


def _answer(given: argparse.Namespace) -> str:
    shape = {name: getattr(given, name) for name in SIZES if getattr(given, name) is not None}
    if given.model:
        model = replace(named(given.model), **shape)
    elif {"layers", "width", "heads"} <= shape.keys():
        model = Transformer(**shape, llama=given.llama, tied=not given.llama)
    else:
        raise ValueError("which model? Say --model, or --layers, --width and --heads")
    micro_batches = given.micro_batches or (4 * given.pipeline if given.pipeline > 1 else 1)
    names = [name for name in vars(Layout()) if name not in ("stage", "micro_batches")]
    layout = Layout(micro_batches=micro_batches, **{name: getattr(given, name) for name in names})
    if given.stage not in (None, 3) and (layout.replicate > 1 or not layout.reshard_after_forward):
        raise ValueError("--replicate and --no-reshard-after-forward are of --stage 3")
    recipe = {"optimizer": given.optimizer, "precision": given.precision}
    name = given.model or "This model"
    return page(name, model, layout, _device(given), given.stage, **recipe)


def _device(given: argparse.Namespace) -> Device:
    units = {"memory": 1e9, "flops": 1.0, "utilisation": 1.0}
    own = {name: getattr(given, name) for name in units if getattr(given, name) is not None}
    device = replace(GPUS[given.gpu], **{name: each * units[name] for name, each in own.items()})
    if given.gbps is None:
        return device
    if len(given.gbps) > 2:
        raise ValueError("--gbps takes one number or two: in a node, and to other nodes")
    here, there = LATENCY_US
    cable = Link(device.per_node * given.gbps[-1], latency_us=there)
    return replace(device, link=Link(given.gbps[0], latency_us=here, inter=cable))
