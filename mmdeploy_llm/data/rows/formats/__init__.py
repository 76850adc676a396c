"""Opens corpora: which format an input has, and the formats that plugins read."""
