"""Checks of slow, throttled, idle and unequal devices."""
