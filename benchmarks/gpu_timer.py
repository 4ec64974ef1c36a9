"""Microseconds of work on a GPU: CUDA events, cold L2, graph replays. No result without a GPU."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

Work = Callable[[], object]

_WARM_UPS = 5
_FLUSH_BYTES = 2**30  # several times any L2, AMD's 256 MiB behind it included


@dataclass(frozen=True)
class Timing:
    """Medians over the repetitions, in microseconds."""

    us: float  # on the GPU: a graph's replay, or queued behind other work where it has none
    us_min: float
    us_max: float
    graph: bool
    call_us: float  # from Python, on an idle GPU: what the launch costs is in it


class GpuTimer:
    """Times work on the current CUDA or ROCm device, each repetition with a cold L2."""

    def __init__(self, repetitions: int = 30) -> None:
        self.repetitions = repetitions
        self._buffer = torch.empty(_FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")

    def measure(self, work: dict[str, Work], captures: bool = True) -> dict[str, Timing]:
        """Time all in turn, so that clocks that drift hit all alike; a key names its result."""
        for run in work.values():
            for _ in range(_WARM_UPS):
                run()
        graphs = {name: _capture(run) if captures else None for name, run in work.items()}
        on_gpu: dict[str, list[float]] = {name: [] for name in work}
        calls: dict[str, list[float]] = {name: [] for name in work}
        for i in range(self.repetitions):
            for name in sorted(work, reverse=bool(i % 2)):
                on_gpu[name].append(self._time(graphs[name] or work[name], idle=False))
                calls[name].append(self._time(work[name], idle=True))
        return {
            name: Timing(
                statistics.median(on_gpu[name]),
                min(on_gpu[name]),
                max(on_gpu[name]),
                graphs[name] is not None,
                statistics.median(calls[name]),
            )
            for name in work
        }

    def copy_bandwidth(self) -> float:
        """Bytes per second, read and written, of a copy within the device's memory."""
        source, target = torch.zeros(2, 2**30, dtype=torch.uint8, device="cuda")
        timing = self.measure({"copy": lambda: target.copy_(source)})["copy"]
        return float(2 * source.numel() / (timing.us * 1e-6))

    def floor(self) -> float:
        """Microseconds of a launch that does next to nothing: no row can be shorter."""
        one = torch.zeros(1, device="cuda")
        return self.measure({"floor": lambda: one.add_(1)})["floor"].us

    def _time(self, run: Work, *, idle: bool) -> float:
        self._flush()
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        if idle:
            torch.cuda.synchronize()
        # otherwise all this is queued while the flush still runs, and no launch is waited for
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end) * 1e3)

    def _flush(self) -> None:
        self._buffer.zero_()
        # what was written last would be written back to memory during the work: read it away
        self._buffer.sum()


def _capture(run: Work) -> Work | None:
    """Capture a replay of the work, without Python; None where it cannot be captured."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # libraries set themselves up per stream, which a capture forbids
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay
