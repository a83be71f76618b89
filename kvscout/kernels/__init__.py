"""Device code shared by two or more variants."""
