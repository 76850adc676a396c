"""Room 2 decides: who runs, how many tokens, which blocks, what to encode. Imports no torch."""
