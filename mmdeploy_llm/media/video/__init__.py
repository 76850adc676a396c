"""Opens videos: containers, animations and lists of frames, and the times of their frames."""
