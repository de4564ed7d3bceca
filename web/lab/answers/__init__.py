"""What the lab's rooms ask of minidist, and its answers: JSON in, JSON out.

Each module here is a room. Its `choices()` has the names that the room's controls offer, and its
`answer(asked)` takes their values. This runs in the reader's browser, by Pyodide, and in any
Python: none of it needs torch.
"""

import json

from . import collectives, mesh, planner, schedules

ROOMS = {
    "planner": planner,
    "schedules": schedules,
    "collectives": collectives,
    "mesh": mesh,
}


def choices(room: str) -> str:
    """What the controls of this room offer."""
    return json.dumps(ROOMS[room].choices())


def answer(room: str, text: str) -> str:
    """The room's answer to the values in `text`. What minidist refuses with a ValueError, such as a
    layout that does not divide, is {"error": its sentence}."""
    try:
        found = ROOMS[room].answer(json.loads(text))
    except ValueError as error:
        found = {"error": str(error)}
    return json.dumps(found, allow_nan=False)  # JavaScript reads neither NaN nor Infinity
