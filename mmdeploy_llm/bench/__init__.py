"""`mmdeploy-llm bench`: how fast a model is on this machine, and how far that is from its limit."""
