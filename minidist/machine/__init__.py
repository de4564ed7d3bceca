"""What runs the ranks: processes (`runtime`), messages in shared memory (`backend`), and
cells of a notebook that run on all of them (`notebook`).
"""
