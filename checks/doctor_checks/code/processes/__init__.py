"""Rules about forked and spawned processes, and files that several processes write."""
