"""Variants of ``mqa_logits``, one kernel design a file."""
