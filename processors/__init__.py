"""In-tree media processors and sources, each a plugin."""
