"""The lab's Python, without a browser: two rooms against minidist itself, refusals in a sentence,
and the zip in a Python that has no torch. The other rooms have files of their own."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minidist import Link
from minidist.instruments import planner
from minidist.instruments.plot import palette
from minidist.pipeline import schedules
from web.lab import answers

ROOT = Path(__file__).parent.parent

LAYOUT: dict[str, Any] = {
    **{"world_size": 16, "tensor": 2, "pipeline": 2, "context": 1, "stage": 1, "micro_batch": 2},
    **{"recompute": "elementwise", "sequence_parallel": True, "chunks": 2, "replicate": 1},
    **{"reshard_after_forward": True, "loss_chunks": 8, "experts": 1},
}
PLAN = LAYOUT | {"model": "llama-3-8b", "gpu": "h100", "precision": "megatron", "batch": 128}
SCHEDULE: dict[str, Any] = {
    **{"schedule": "interleaved", "ranks": 4, "microbatches": 8, "chunks": 3, "nodes": 2},
    **{"forward": 10, "inputs": 12, "weights": 7, "gbps": 10, "latency_us": 20, "mb": 5},
}


def ask(room: str, asked: dict[str, Any]) -> dict[str, Any]:
    return json.loads(answers.answer(room, json.dumps(asked)))


def test_the_planner_says_what_minidist_says() -> None:
    model, gpu = planner.MODELS["llama-3-8b"], planner.GPUS["h100"]
    layout = planner.Layout(**LAYOUT, micro_batches=16)  # 128 sequences, 4 replicas of 2 at once
    took = planner.step_time(model, layout, gpu, "megatron")
    said = ask("planner", PLAN)
    assert said["total"] == planner.peak(model, layout, precision="megatron").total
    assert said["seconds"] == took.total
    assert sum(said["times"].values()) == pytest.approx(took.total)
    assert said["mfu"] == pytest.approx(planner.mfu(model, layout, gpu, took.total))
    assert (said["data"], said["micro_batches"]) == (4, 16)


@pytest.mark.parametrize("given", [{}, {"world_size": 1024, "tensor": 1, "model": "llama-3-70b"}])
def test_a_found_layout_fits_and_its_controls_show_it(given: dict[str, Any]) -> None:
    asked = PLAN | given  # the second one cannot be: more replicas than sequences
    found = ask("planner", asked | {"search": True})
    shown = ask("planner", asked | found["set"])
    assert shown == {name: value for name, value in found.items() if name != "set"}
    assert all(asked[name] != value for name, value in found["set"].items())
    assert shown["total"] <= shown["usable"]
    assert "error" in ask("planner", asked) or shown["seconds"] <= ask("planner", asked)["seconds"]


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_a_schedule_is_minidists(name: str) -> None:
    chunks = 3 if name == "interleaved" else 1
    parts = [each / chunks for each in (0.010, 0.012, 0.007)]
    made = schedules.find(name, 4, 8, 4 * chunks)
    expected = schedules.simulate(made, *parts, link=Link(10, 20), nbytes=5e6, nodes=2)
    said = ask("schedules", SCHEDULE | {"schedule": name})
    row = next(each for each in said["table"] if each["name"] == name)
    assert (row["time"], row["idle"]) == pytest.approx((expected.time, expected.idle))
    assert row["kept"] == [count / chunks for count in expected.in_flight]
    drawn = [[(span["start"], span["stage"]) for span in own] for own in said["spans"]]
    assert drawn == [
        [(pytest.approx(span.start), span.instruction.stage) for span in own]
        for own in expected.spans
    ]


def test_what_cannot_be_is_a_sentence() -> None:
    for wrong, words in [
        ({"batch": 100}, "100 sequences a step are no multiple of 8"),
        ({"tensor": 16, "world_size": 8}, "8 ranks are no multiple of tensor 16"),
        ({"pipeline": 64, "world_size": 128}, "32 layers are too few for 64 stages"),
        ({"world_size": 1, "model": "llama-3-70b", "search": True}, "no layout fits on 1 of these"),
    ]:
        assert words in ask("planner", PLAN | wrong)["error"]
    said = ask("schedules", SCHEDULE | {"microbatches": 9})
    refused = {row["name"]: row["error"] for row in said["table"] if "error" in row}
    assert "9 is not a multiple" in refused.pop("interleaved") and not refused
    assert said["spans"] == []


PROGRAM = """
import json, sys
sys.modules["torch"] = None  # to import it is an ImportError
sys.path.insert(0, sys.argv[1])
import answers, minidist
assert minidist.__file__.startswith(sys.argv[1]), minidist.__file__
print(json.dumps([answers.choices(room) for room in answers.ROOMS]))
print(answers.answer("planner", sys.argv[2]))
print(answers.answer("schedules", sys.argv[3]))
"""


def test_the_zip_needs_no_torch_and_nothing_of_the_course_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "lab.zip"
    subprocess.run([sys.executable, ROOT / "web/bundle.py", target], check=True, timeout=60)
    asked = [json.dumps(PLAN | {"search": True}), json.dumps(SCHEDULE)]
    command = [sys.executable, "-I", "-c", PROGRAM, target, *asked]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    choices, plan, schedule = map(json.loads, told.stdout.splitlines())
    assert choices == [answers.choices(room) for room in answers.ROOMS]
    assert plan == ask("planner", PLAN | {"search": True})
    assert schedule == ask("schedules", SCHEDULE)


def test_colours_are_those_of_the_palette() -> None:
    text = (ROOT / "web/lab/draw.mjs").read_text()
    found, ranks = re.findall(r"COLORS = \{(.*?)\};.*?RANKS = \[(.*?)\];", text, re.S)[0]
    colors = dict(re.findall(r'(\w[\w ]*)"?: "(#\w{6})"', found))
    assert len(colors) > 15
    assert colors == {name: palette.color(name) for name in colors}
    assert re.findall(r"#\w{6}", ranks) == list(palette.RANKS)
