"""Search for the hosts, links or halves of a network that explain slow pairs."""
