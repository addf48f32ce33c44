"""Identity of a process, endpoint of the store, and connections to it."""
