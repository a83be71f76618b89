"""Variants of ``selection_tables``, one design a file."""
