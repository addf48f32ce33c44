"""Checks of device errors: Xids, ECC errors, lost devices and faults of kernels."""
