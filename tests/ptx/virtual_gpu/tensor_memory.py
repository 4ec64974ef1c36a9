"""Blackwell's tensor memory."""


class TensorMemory:
    """Not modelled yet."""

    def __init__(self, programs: int):
        self.programs = programs


HANDLERS = {}
