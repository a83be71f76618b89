"""Variants of ``topk``, one design a file."""
