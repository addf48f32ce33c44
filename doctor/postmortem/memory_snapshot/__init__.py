"""Memory snapshots of torch.cuda."""
