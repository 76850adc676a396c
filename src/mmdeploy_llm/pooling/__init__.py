"""Makes vectors and scores of a model's last hidden states."""
