"""Variants of ``kv_cache``, one design a file."""
