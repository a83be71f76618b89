"""Writing new tokens into a paged KV cache."""
