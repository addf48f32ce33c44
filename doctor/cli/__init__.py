"""The command line: parses options, calls the session, and writes reports."""
