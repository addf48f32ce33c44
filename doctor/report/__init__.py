"""Reports of findings: text, an HTML page with charts, Markdown, JSON, JUnit and GitHub annotations."""
