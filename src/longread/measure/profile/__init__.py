"""Where the time to the first token goes, on three levels in one table: client, server, kernels."""
