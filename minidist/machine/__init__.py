"""What runs the ranks: processes (`runtime`), the emulated network between them (`backend`), and
cells of a notebook that run on all of them (`notebook`).
"""
