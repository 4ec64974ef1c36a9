"""`fp8kv doctor`."""

from commands.running import print_table, run


def doctor() -> None:
    """Say what this machine can run: GPU, FP8 support, Triton, versions."""

    def work() -> None:
        from calib.doctor import examine

        print_table("This machine", ("what", "found"), examine())

    run(work)
