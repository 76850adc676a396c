"""Opens the outputs of batches: by a name or a format, those that plugins write, several as one."""
