"""A backend of matplotlib for ranks: what a `%%ranks` cell draws is shown by the notebook.

A kernel's own backend draws into that kernel, and a rank has none. matplotlib finds this one by
MPLBACKEND, and only in a rank that plots is it imported.
"""

import io
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvas

from minidist.runtime import cell

__all__ = ["FigureCanvas", "show"]


def show(*_: Any, **__: Any) -> None:
    """Keep all open figures for the notebook, and close them, as a notebook does."""
    import matplotlib.pyplot as plt

    for number in plt.get_fignums():
        if cell.pictures is None:
            print("A figure is shown from a %%ranks cell only: here, return it to the notebook.")
            return
        picture = io.BytesIO()
        plt.figure(number).savefig(picture, format="png", bbox_inches="tight")
        cell.pictures.append(picture.getvalue())
    plt.close("all")
