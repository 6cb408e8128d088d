"""The model, one mechanism a file, in reading order:
rope norm hyper engram compressor indexer attention moe block transformer."""
