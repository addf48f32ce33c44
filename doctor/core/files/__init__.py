"""Files and folders that may be hostile: opened by descriptor, checked for their owner, read with a bound."""
