"""Cross entropy of a linear layer: the loss of a language model's head."""
