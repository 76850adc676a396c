"""The parts that image processors share: files and their limits, decoding, resizing, patches and
tiles.

A family's processor stands in its plugin and builds on these. Importing this package imports
neither Pillow nor torch.
"""
