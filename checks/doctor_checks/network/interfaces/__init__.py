"""Checks of network interfaces: selection, state, addresses, subnets and MTU."""
