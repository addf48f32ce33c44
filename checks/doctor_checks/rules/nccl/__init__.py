"""Rules about launch files and scripts that find the faults of checks of the family nccl."""
