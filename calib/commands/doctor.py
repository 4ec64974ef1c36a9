"""`fp8kv doctor`."""

from calib.commands.flags import AsJson
from calib.commands.running import command, print_json, print_table


@command
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine can run: GPU, FP8 support, Triton, versions."""
    from calib.doctor import examine

    found = examine()
    if as_json:
        print_json(dict(found))
    else:
        print_table("This machine", ("what", "found"), found)
