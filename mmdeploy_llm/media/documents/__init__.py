"""Pages of documents: ranges of them, and what a page is made of."""
