"""A plugin inside serving engines, that checks, repairs and replaces the scales in force."""
