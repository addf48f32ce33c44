"""Output of NCCL's RAS client."""
