"""Checksums and losses that show whether replicas are equal."""
