"""rankdoctor: the doctor for distributed PyTorch training."""
