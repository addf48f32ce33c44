"""Access to files and folders that may be hostile: opened by descriptor, owner checked, reads bounded."""
