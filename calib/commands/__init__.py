"""The commands of `fp8kv`, one module each: flags in, one call into calib, text out.

The only code that prints. Nothing heavy is imported before a command runs.
"""
