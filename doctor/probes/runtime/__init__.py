"""Child processes with torch, deadlines and costs of probes."""
