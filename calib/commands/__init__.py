"""The commands of `fp8kv`, one module each: flags in, one call into calib, text out.

With `cli.py` the only code that prints. Nothing heavy is imported before a command runs.
"""
