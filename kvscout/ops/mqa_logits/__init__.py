"""Lightning-indexer scores of every query against every cached key."""
