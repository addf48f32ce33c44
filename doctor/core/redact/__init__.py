"""Placeholders for users, hosts, paths and addresses."""
