"""`mmdeploy-llm bench`: measures a model's speed and compares it with the machine's limit."""
