"""Variants of ``pa_decode``, one kernel design a file."""
