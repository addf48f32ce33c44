"""Checks of RDMA devices, ports and GPUDirect."""
