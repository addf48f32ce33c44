"""Key-value stores between processes: TCPStore, a shared folder, Ray; signing and failover."""
