"""The commands of the program, one module each; they are imported when they run."""
