"""What the notebooks need and no experiment does: the checks of puzzles and exercises, predictions,
the second language, and small models and data.
"""
