"""Facts about file systems that a job reads from or writes to."""
