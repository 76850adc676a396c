"""Several outputs of batches read as one."""
