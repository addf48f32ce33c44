"""Who a process is, where the ranks meet, and whether that address answers."""
