"""Implementation of tokamax; import names from `tokamax` instead."""
