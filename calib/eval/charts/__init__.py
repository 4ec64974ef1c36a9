"""The report's charts: inline SVG in the page's colours, without any text that others chose."""
