"""Data of the page's charts."""
