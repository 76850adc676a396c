"""Shows what the program says on a terminal, and ends it with Ctrl-C; independent of commands."""
