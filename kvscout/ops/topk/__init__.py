"""The best k keys of every query."""
