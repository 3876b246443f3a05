"""Attention: `softmax(scale * q @ k.T) @ v` for each head."""
