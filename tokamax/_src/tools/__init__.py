"""Command lines, thin over the public API."""
