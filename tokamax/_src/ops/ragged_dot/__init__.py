"""Linear layers chosen per row: a matrix product whose right side depends on the group of the row."""
