"""The parts that video processors share: containers and their timelines, lists of frames, the
choice of frames, and the base class that turns frames into patch rows.

A family's processor stands in its plugin and builds on these. Importing this package imports
neither PyAV, Pillow nor torch.
"""
