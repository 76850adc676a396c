"""Room 4 delivers: token ids to text, stop strings, reasoning, RequestOutput. Imports no torch."""
