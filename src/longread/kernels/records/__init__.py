"""Records of pages in main memory, spread over the storages that they were read from."""
