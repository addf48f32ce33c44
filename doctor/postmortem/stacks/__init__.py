"""Stacks that users collected with other tools: py-spy, pystack, gdb, faulthandler, ray stack, torch's debug server."""
