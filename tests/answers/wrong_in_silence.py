"""Answers to the puzzles and the exercise of the lesson wrong_in_silence."""
