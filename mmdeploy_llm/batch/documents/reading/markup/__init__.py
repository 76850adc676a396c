"""Makes Markdown of what OCR models answer: tags, cells, JSON, marks of places."""
