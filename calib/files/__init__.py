"""Model directories read without torch and without trust: headers, JSON, and the scales alone."""
