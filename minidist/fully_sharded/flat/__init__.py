"""Torch's older form, with a flat parameter for each unit. Lesson: fully_sharded"""
