"""The operations, one folder each: ``api.py`` is the way in."""
