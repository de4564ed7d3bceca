"""`python -m minidist plan`: the planner's page, by flags. Lesson: zero."""

import argparse
from dataclasses import replace

from minidist.instruments import planner
from minidist.instruments.link import Link
from minidist.instruments.planner.page import page, states_page
from minidist.instruments.planner.transformer import named


def add(sub: argparse.ArgumentParser) -> None:
    """The options."""
    sub.add_argument("--model", help=", ".join(planner.MODELS))
    sub.add_argument("--gpu", default="h100", choices=planner.GPUS, help="what a rank is (h100)")
    sub.add_argument("--params", type=float, help="in place of a model: its size, such as 7.5e9")
    sub.add_argument("--optimizer", default="adam", choices=planner.OPTIMIZERS)
    sub.add_argument("--precision", default="mixed", choices=planner.PRECISIONS)
    shape = sub.add_argument_group("a model of your own, or what differs from --model")
    for name in "layers", "width", "heads", "kv-heads", "hidden", "length", "vocabulary":
        shape.add_argument(f"--{name}", type=int)
    shape.add_argument("--llama", action="store_true", help="gated MLP, RMS norms, no biases")
    lay = sub.add_argument_group("how it is laid out")
    for name, help in {
        "world-size": "ranks (1, as all of these)",
        "tensor": "ranks that share each layer",
        "context": "ranks that share each sequence",
        "pipeline": "stages",
        "experts": "ranks that share each layer's experts",
        "micro-batch": "sequences at once",
        "chunks": "of a pipeline rank: interleaved",
        "replicate": "copies of ZeRO-3's shards: hybrid sharding",
        "loss-chunks": "pieces of the logits, one after another",
    }.items():
        lay.add_argument(f"--{name}", type=int, default=1, help=help)
    lay.add_argument("--micro-batches", type=int, help="of a step (1; 4 a stage in a pipeline)")
    lay.add_argument("--stage", type=int, choices=planner.STAGES, help="of ZeRO (what fits first)")
    lay.add_argument("--sequence-parallel", action="store_true")
    lay.add_argument("--imbalance", type=float, default=1.0, help="fullest rank of experts / mean")
    lay.add_argument("--once", action="store_true", help="tokens go once to each node with experts")
    lay.add_argument("--stored-attention", action="store_true", help="no flash attention")
    lay.add_argument(
        "--no-reshard-after-forward", dest="reshard_after_forward", action="store_false"
    )
    again = "norms and activation functions; stored scores; torchtitan's selective; layers"
    for name, choices, help in (
        ("recompute", planner.RECOMPUTE, again),
        ("context-attention", planner.CONTEXT_ATTENTION, "how keys come to the ranks of --context"),
        ("context-cut", planner.CONTEXT_CUT, "contiguous: the last rank computes most"),
    ):
        lay.add_argument(f"--{name}", default=choices[0], choices=choices, help=help)
    gpu = sub.add_argument_group("what differs from --gpu")
    gpu.add_argument("--memory", type=float, metavar="GB")
    gpu.add_argument("--flops", type=float, help="peak of operations a second, such as 989e12")
    gpu.add_argument("--utilisation", type=float, help="the part of them that is reached")
    gpu.add_argument("--gbps", type=float, nargs="+", help="a rank's, Gb/s: in a node, to others")

    def run(arguments: argparse.Namespace) -> None:
        try:
            print(_answer(arguments))
        except ValueError as error:
            sub.error(str(error))

    sub.set_defaults(run=run)


def _answer(given: argparse.Namespace) -> str:
    recipe = {"optimizer": given.optimizer, "precision": given.precision}
    device = _device(given)
    sizes = ("layers", "width", "heads", "kv_heads", "hidden", "length", "vocabulary")
    shape = {name: getattr(given, name) for name in sizes if getattr(given, name) is not None}
    if given.params is not None and not given.model and not shape:
        return states_page(given.params, given.world_size, device.memory, **recipe)
    if given.params is not None:
        raise ValueError("--params is a model of which only the size is known: leave it away")
    if given.model:
        model = replace(named(given.model), **shape)
    elif {"layers", "width", "heads"} <= shape.keys():
        model = planner.Transformer(**shape, llama=given.llama, tied=not given.llama)
    elif shape:
        raise ValueError("a transformer needs --layers, --width and --heads")
    else:
        raise ValueError("which model? Say --model, or --params, or --layers, --width and --heads")
    micro_batches = given.micro_batches
    if micro_batches is None:
        micro_batches = 4 * given.pipeline if given.pipeline > 1 else 1
    names = [name for name in vars(planner.Layout()) if name not in ("stage", "micro_batches")]
    layout = planner.Layout(
        micro_batches=micro_batches, **{name: getattr(given, name) for name in names}
    )
    if given.stage not in (None, 3) and (layout.replicate > 1 or not layout.reshard_after_forward):
        raise ValueError("--replicate and --no-reshard-after-forward are of --stage 3")
    return page(given.model or "This model", model, layout, device, given.stage, **recipe)


def _device(given: argparse.Namespace) -> planner.Device:
    units = {"memory": 1e9, "flops": 1.0, "utilisation": 1.0}
    own = {name: getattr(given, name) for name in units if getattr(given, name) is not None}
    device = replace(
        planner.GPUS[given.gpu], **{name: each * units[name] for name, each in own.items()}
    )
    if given.gbps is not None:
        if len(given.gbps) > 2:
            raise ValueError("--gbps takes one number or two: in a node, and to other nodes")
        here, there = planner.LATENCY_US
        cable = Link(device.per_node * given.gbps[-1], latency_us=there)
        device = replace(device, link=Link(given.gbps[0], latency_us=here, inter=cable))
    return device
