"""What a rank's data loaders and samplers delivered."""
