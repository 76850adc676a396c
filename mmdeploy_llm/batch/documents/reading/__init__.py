"""Reads documents page by page: `mmdeploy-llm read`. A page is an item of a batch; Markdown is made
of its answer, and of the pages of a document one text."""
