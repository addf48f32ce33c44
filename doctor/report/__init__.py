"""Reports of findings: text, an HTML page with charts, Markdown, JSON, JUnit and GitHub annotations.

The templates of the page are in ``html/page/``, and ``html/charts/svg.py`` draws its charts. ``python -m
tests.report.picture report.html OUT.png`` renders a page as a picture.
"""
