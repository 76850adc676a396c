"""Guards against what comes from outside: files of a folder that are too large or malformed, calls
that never end. Nothing here imports torch."""
