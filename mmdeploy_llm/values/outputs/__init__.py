"""Outputs of an engine: results of requests, vectors and scores, measurements."""
