"""The report for people: report.html with its charts, and report.md."""
