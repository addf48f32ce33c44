"""Other ranks on the same host: their state and their stacks."""
