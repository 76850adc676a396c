"""The decoder of models whose layers attend to an encoder (BART, Whisper, TrOCR), for the families
that have one."""
