"""A museum of silent bugs: how to visit it. The notebook beside this file shows the way, and
`workshop` says what an exhibit is."""

import base64
import hashlib
import json
import textwrap
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from workshop import HERE, IGNORE, load, on_a_rank, path_of

import minidist as md
from minidist.course.checks.verdict import Verdict

STEPS = 80  # of a loss curve
TOOLS = "watch", "parity", "hashes", "bytes", "memory", "curve"


def parity_says(ranks, exhibit: int | str, form: str) -> str:
    shown = load(exhibit)
    if not shown.PARITY:
        return ""
    images, labels = md.zoo.digits(torch.float64)
    try:
        md.parity.check(
            partial(on_a_rank, "parity_wrap", exhibit, form),
            model=shown.model,
            optimizer=partial(on_a_rank, "alone", exhibit),
            step=partial(on_a_rank, "parity_step", exhibit, form),
            loss_fn=partial(F.cross_entropy, ignore_index=IGNORE),
            data=(images, shown.labels(labels)),
            clip=shown.CLIP,
            ranks=ranks,
        )
    except md.parity.ParityError as error:
        return str(error)
    return ""


def reading(ranks, exhibit: int | str, form: str, tool: str) -> Any:
    """What a tool says of an exhibit. For bytes and memory: of both ranks together."""
    if tool == "parity":
        return parity_says(ranks, exhibit, form)
    if tool == "watch":
        return ranks(on_a_rank, "watch_says", exhibit, form)[0]
    if tool == "bytes":
        return sum(each["bytes"] for each in _readings(ranks, exhibit, form))
    if tool == "memory":
        held = [each["memory"] for each in _readings(ranks, exhibit, form)]
        return [sum(of_ranks) for of_ranks in zip(*held, strict=True)]
    return _readings(ranks, exhibit, form)[0][tool]


def _readings(ranks, exhibit: int | str, form: str) -> Any:
    return _run(ranks, path_of(exhibit), form, Path(path_of(exhibit)).read_text())


@cache
def _run(ranks, path: str, form: str, text: str) -> Any:
    """One run for four tools, and another one when the file has changed."""
    return ranks(on_a_rank, "readings", path, form, STEPS)


def hunt(ranks, exhibit: int | str, tool: str, form: str = "WRONG") -> None:
    """Print what a tool says."""
    if tool not in TOOLS:
        raise ValueError(f"the tools are {', '.join(TOOLS)}, not {tool!r}")
    if getattr(load(exhibit), form, None) is None:
        raise ValueError(f"exhibit {exhibit} has no form {form!r}")
    read = reading(ranks, exhibit, form, tool)
    if tool == "hashes":
        read = f"on both ranks the same: {', '.join(read) or 'nothing'}"
    elif tool == "parity" and not load(exhibit).PARITY:
        read = "cannot be asked about this one"
    elif tool == "bytes":
        read = f"{read:,} handed to collectives or sent in step 4"
    elif tool == "memory":
        read = f"{', '.join(f'{held:,}' for held in read)} held after steps 1, 2, 3"
    elif tool == "curve":
        read = f"loss {read[0]:.3f} at step 1, {read[-1]:.3f} at step {STEPS}"
    print(textwrap.fill(f"{tool:7} {read or '(silent)'}", 98, subsequent_indent=" " * 8))


def seen_by(ranks, exhibit: int | str) -> list[str]:
    """The tools that tell the wrong form: the watch and parity if they say something, the others if
    they read something else off the right one."""

    def sees(tool: str) -> bool:
        wrong = reading(ranks, exhibit, "WRONG", tool)
        return bool(wrong if tool in ("watch", "parity") else wrong != right(tool))

    def right(tool: str) -> Any:
        return reading(ranks, exhibit, "RIGHT", tool)

    return [tool for tool in TOOLS[:-1] if sees(tool)]


def mark(exhibit: int | str, tool: str, seen: list[str]) -> str:
    """For a table: whether it sees the bug, and – if it cannot be asked."""
    if tool == "parity" and not load(exhibit).PARITY:
        return "–"
    return "×" if tool in seen else "·"


def show(exhibit: int | str) -> None:
    """Print an exhibit, with the numbers of its lines."""
    for number, line in enumerate(Path(path_of(exhibit)).read_text().splitlines(), start=1):
        print(f"{number:2}  {line}".rstrip())


def open(exhibit: int, line: int | None) -> Verdict:
    """Open a sealed exhibit with the number of the line that is wrong."""
    seals = json.loads((HERE / "sealed.json").read_text())
    if str(exhibit) not in seals:
        raise ValueError(f"sealed are {', '.join(seals)}, not {exhibit}")
    for seal in seals[str(exhibit)]:
        said = unseal(base64.b64decode(seal), exhibit, line)
        if said.startswith(b"Right: "):
            return Verdict(True, said.decode())
    return Verdict(False, f"Not yet: line {line} is not it." if line else "Not yet.")


def unseal(text: bytes, exhibit: int, line: int | None) -> bytes:
    """It seals, too. The salt makes a table of hashes useless, if not a loop over all lines."""
    salted = f"a museum of silent bugs, {exhibit}, {line}".encode()
    key = hashlib.pbkdf2_hmac("sha256", salted, b"minidist", 10_000, len(text))
    return bytes(a ^ b for a, b in zip(text, key, strict=True))


def gallery(ranks, exhibits) -> None:
    """Draw the loss of each exhibit, and that of its right form."""
    with md.plot.style() as plt:
        figure, axes = plt.subplots(4, 5, figsize=(11, 7.5), sharex=True, layout="constrained")
        for exhibit, axis in zip(exhibits, axes.flat):  # noqa: B905 (twenty at most)
            for form, style in ("RIGHT", "C0-"), ("WRONG", "C3--"):
                axis.plot(reading(ranks, exhibit, form, "curve"), style, label=form.lower())
            axis.set(ylim=(0, 3.5))
            axis.set_title(f"{exhibit} {load(exhibit).title}", fontsize=8)
        axes[0, 0].legend(fontsize=8)
        figure.supxlabel("step")
        figure.supylabel("loss")
        plt.show()
