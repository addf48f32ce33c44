"""Functions that a script imports from other files of its project."""
