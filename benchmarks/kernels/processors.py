"""One GPU of each target: what its processors hold, and how fast they and the memory are."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Processor:
    """A streaming multiprocessor or compute unit, and the GPU it is one of.

    From NVIDIA's programming guide and AMD's instruction set manuals (limits), and from the
    vendors' data sheets (counts, clocks, memory, dense float16).
    """

    gpu: str
    count: int
    ghz: float
    tb_per_s: float
    registers: int  # 32-bit, per lane of all warps of one scheduler
    granule: int  # in which a warp gets them
    warps: int
    programs: int
    shared_memory: int  # bytes
    reserved: int  # bytes of it that every program costs beside its own
    flops_per_cycle: int  # dense, float16
    lanes: int  # of a warp
    schedulers: int = 4

    @property
    def bytes_per_cycle(self) -> float:
        """Its share of the memory's bandwidth."""
        return self.tb_per_s * 1e3 / self.ghz / self.count

    def programs_at_once(self, registers: int, shared_memory: int, num_warps: int) -> int:
        """How many programs run on it at the same time."""
        each = -(-max(registers, 1) // self.granule) * self.granule
        warps = min(self.warps, self.registers // each * self.schedulers)
        memory = self.shared_memory // (shared_memory + self.reserved)
        return min(warps // num_warps, memory, self.programs)


def _nvidia(gpu: str, count: int, ghz: float, tb_per_s: float, warps: int, kib: int, flops: int) -> Processor:
    # 16,384 registers per scheduler are 512 per lane; programs: half as many as warps
    limits = (512, 8, warps, warps // 2, kib * 1024, 1024)
    return Processor(gpu, count, ghz, tb_per_s, *limits, flops, 32)


PROCESSORS = {
    "sm_80": _nvidia("A100 80GB SXM", 108, 1.41, 2.039, 64, 164, 2048),
    "sm_89": _nvidia("L40S", 142, 2.52, 0.864, 48, 100, 1024),
    "sm_90": _nvidia("H200", 132, 1.98, 4.8, 64, 228, 4096),
    "sm_100": _nvidia("B200", 148, 1.85, 8.0, 64, 228, 8192),
    "gfx942": Processor("MI300X", 304, 2.1, 5.3, 512, 8, 32, 32, 65_536, 1, 2048, 64),
    "gfx950": Processor("MI355X", 256, 2.4, 8.0, 512, 8, 32, 32, 163_840, 1, 4096, 64),
}
