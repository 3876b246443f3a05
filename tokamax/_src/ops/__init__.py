"""Op families: one folder each, one file per kernel."""
