"""Reports of findings: text, an HTML page with charts, Markdown, JSON, JUnit and GitHub annotations.

The templates of the page are in ``html/page/``. ``bash doctor/report/html/page/charts/build.sh`` rebuilds the chart
library (it needs npm and the network); ``python -m tests.report.picture report.html OUT.png`` renders a page as a
picture.
"""
