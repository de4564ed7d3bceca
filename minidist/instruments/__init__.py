"""What measures, compares and predicts: no strategy, but what shows what a strategy does.

Lessons reach these rooms as `md.measure`, `md.plot`, `md.planner`, …
"""
