"""Facts about NCCL: its configuration files, plugins and library."""
