"""The room "A mesh"."""

from typing import Any


def choices() -> dict[str, Any]:
    return {}


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    return {"ranks": asked["ranks"]}
