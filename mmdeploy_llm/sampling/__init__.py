"""From logits to the next token of every request, vectorised over the batch."""
