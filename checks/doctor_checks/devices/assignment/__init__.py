"""Checks of the devices that a rank sees, and of who else uses them."""
