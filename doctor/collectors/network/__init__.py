"""Facts about interfaces, routes, names and RDMA devices."""
