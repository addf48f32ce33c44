"""Exchange of facts between the processes of a job: transports, rendezvous, gathering, Ray, host lists."""
