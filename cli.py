"""The command line in a checkout: `python cli.py`, as `fp8kv` where it is installed."""

from calib.commands.app import calibrate_main, eval_main, main

__all__ = ["calibrate_main", "eval_main", "main"]

if __name__ == "__main__":
    main()
