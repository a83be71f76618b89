"""The plan of paged-attention decode: which tiles of which sequence each workgroup takes."""
