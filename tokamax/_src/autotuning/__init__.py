"""Tuning: outcomes, search, the autotuner, results and where they are kept."""
