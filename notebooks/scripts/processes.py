"""Four ranks from Python's own processes: run it by `python processes.py`."""

import multiprocessing as mp
import tempfile

from spawned import work

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        ranks = [mp.Process(target=work, args=(rank, 4, folder)) for rank in range(4)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
