"""What takes memory: optimizer states, shards, the caching allocator, the CUDA context."""
