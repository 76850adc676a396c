"""In-tree plugins; each folder could be a package of its own."""
