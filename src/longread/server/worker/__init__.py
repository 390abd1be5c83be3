"""The engine in a process of its own: what the server's side of it and the process itself need."""
