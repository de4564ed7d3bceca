"""What every test file uses: pools of ranks that are kept from one test to the next."""

import gc
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import hypothesis
import least
import pytest
import torch
from agents import Agent
from programs import SOAK

import minidist as md
from minidist.machine.runtime import Pool

pytest_plugins = ["needs"]

# For this process; ranks set their own. On a busy machine threads spend minutes on small tensors,
# since those that wait for each other do so by computing.
torch.set_num_threads(1)

# Time says nothing on a busy machine; and what CI finds, everybody can find again.
hypothesis.settings.register_profile("here", deadline=None, derandomize=not SOAK)
hypothesis.settings.load_profile("here")

# What communicates in its own way is tested on both backends for the CPU: by day on this one, at
# night on the other.
ON_BOTH = {
    "test_changed_after_wrapping": "shm",
    "test_collectives": "gloo",
    "test_ddp_as_torch": "shm",
    "test_distributed_data_parallel": "gloo",
    "test_every_strategy": "shm",
    "test_experts": "shm",
    "test_faults": "shm",
    "test_fully_shard": "gloo",
    "test_fully_sharded": "shm",
    "test_hooks": "shm",
    "test_measure": "gloo",
    "test_memory": "shm",
    "test_mixed_precision": "gloo",
    "test_offload": "shm",
    "test_tracing": "shm",
    "test_zero": "gloo",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pools" in metafunc.fixturenames and metafunc.module.__name__ in ON_BOTH:
        metafunc.parametrize("pools", ["gloo", "shm"], indirect=True, scope="module")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            backend = item.callspec.params.get("pools")
            if backend and backend != ON_BOTH.get(item.module.__name__, backend):
                item.add_marker("soak")
        if item.path.suffix == ".ipynb" and os.environ.get("MINIDIST_TIMING") == "soft":
            item.compare_outputs = partial(without_misses, item.compare_outputs)


def without_misses(compare: Callable[..., bool], outputs: list[Any], stored: list[Any]) -> bool:
    """nbval's comparison of a cell, without the sentences about a time that has missed."""
    for output in outputs:
        if "text" in output:
            output["text"] = re.sub(r"(?m)^.*MINIDIST_TIMING=soft.*\n", "", output["text"])
    return compare([output for output in outputs if output.get("text") != ""], stored)


@pytest.fixture(autouse=True, scope="session")
def no_garbage() -> Iterator[None]:
    """What fails when garbage goes belongs to a test: after the last one nobody would see it."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def pools(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Pool]]:
    """`pools(4)` is a pool of four ranks, the same one at every call within a file.

    Not beyond: a fault that one file makes ends no other file's pools.
    """
    backend = getattr(request, "param", "auto")
    kept: dict[int, Pool] = {}

    def pool(world_size: int) -> Pool:
        if world_size not in kept:
            kept[world_size] = md.ranks(world_size, backend)
        return kept[world_size]

    yield pool
    for opened in kept.values():
        opened.close()


@pytest.fixture(scope="module")
def gloo() -> Iterator[Pool]:
    """Three ranks over gloo, where all others of a file are over shm."""
    with md.ranks(3, backend="gloo") as pool:
        yield pool


@pytest.fixture(autouse=True, scope="module")
def by_value(request: pytest.FixtureRequest) -> None:
    """Send a test's functions to the ranks by value, so that no rank imports pytest."""
    for module in (least, sys.modules[request.module.__name__]):
        cloudpickle.register_pickle_by_value(module)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """`start(...)` is an Agent. At the end of the test none of its processes is left."""
    agents: list[Agent] = []

    def start(*words: object, **options: Any) -> Agent:
        agents.append(Agent(tmp_path, *words, **options))
        return agents[-1]

    yield start
    for agent in agents:
        agent.end()
        agent.process.wait(20)
    assert all(agent.gone_within(20) for agent in agents)
