"""How the files of a project start its programs: commands, processes, hosts and devices."""
