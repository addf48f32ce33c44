"""Lines that show an orderly end, an error or a step."""
