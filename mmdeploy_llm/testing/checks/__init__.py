"""What every plugin must satisfy, as plain functions: one check each, without pytest."""
