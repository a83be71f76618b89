"""The cases of each op, one file an op. A file defines ``CASES``."""
