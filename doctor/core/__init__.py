"""Data structures and utilities of every package: facts, jobs, findings, checks, captures, reports, masking, files."""
