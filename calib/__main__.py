"""`python -m calib`, which is `fp8kv` for what starts modules, as torchrun does."""

from calib.commands.app import main

if __name__ == "__main__":
    main()
