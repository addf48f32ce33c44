"""What is known of releases, variables and grammars: data files read when asked, and the functions that read them."""
