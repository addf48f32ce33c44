"""How files are found, read and checked by rules, and how findings are suppressed."""
