"""Reads what the bytes of sound files say before FFmpeg does: their format after tags, the links of
an Ogg chain, and headers of WAV that FFmpeg takes for something else. Imports no library."""
