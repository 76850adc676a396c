"""Files of a batch opened safely, and the digests that a resumed run compares."""
