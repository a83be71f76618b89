"""Variants of ``selection_gather``, one design a file."""
