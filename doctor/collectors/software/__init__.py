"""Facts about installed packages and shared libraries."""
