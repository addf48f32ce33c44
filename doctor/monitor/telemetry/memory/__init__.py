"""Memory of a process and of its device."""
