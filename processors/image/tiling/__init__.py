"""Processes images into several tiles, crops or slices, for Gemma 3, InternVL, LFM2-VL and
MiniCPM-V. Importing this package imports neither Pillow nor torch."""
