"""Reads the boxes in answers, in pixels of the picture, and writes them as others read them."""
