"""Cost model: predicts which config is fast for a shape that nobody tuned."""
