"""Exchange of facts between the processes of a job: transports, membership, rendezvous, gathering, Ray, host lists."""
