"""Every rank says where it is: run it by `python places.py`, or by torchrun."""

import os

import minidist as md
from minidist.rank import Place


def main() -> str:
    place = Place.here()
    return f"rank {place.rank} is (node {place.node_rank}, local rank {place.local_rank})"


if __name__ == "__main__":
    places = md.launch(main, world_size=4, nodes=2)
    if os.environ.get("RANK", "0") == "0":  # under torchrun, every rank comes this way
        print("\n".join(places))
