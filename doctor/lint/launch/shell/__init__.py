"""Shell scripts: tokens, expansion and commands."""
