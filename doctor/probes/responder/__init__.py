"""The server of the reachability probe."""
