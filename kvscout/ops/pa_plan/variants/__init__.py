"""Variants of ``pa_plan``, one kernel design a file."""
