"""Paged-attention decode: attend from the newest tokens of each sequence to its cached keys and values."""
