"""What an engine returns: outputs of requests, vectors and scores, measurements."""
