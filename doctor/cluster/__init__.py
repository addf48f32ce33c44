"""How the processes of a job exchange facts: transports, rendezvous, gathering, Ray, host lists."""
