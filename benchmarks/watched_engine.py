"""A vLLM in this process whose plugin watches its cache, and counts of what its writer is given."""

import logging
import os
from collections import Counter
from itertools import product
from pathlib import Path

import torch
from engine import generate, start
from torch import Tensor

from calib.data.builtin import builtin_rows
from calib.scales.scales import KVScales
from calib.serving import plugin
from calib.watching import harvest

DOCUMENTATION, CODE = "builtin:python-docs", "builtin:code"
SMALL = {"max_model_len": 640, "num_gpu_blocks_override": 13, "max_num_batched_tokens": 320}
LOG: list[str] = []  # lines of the plugin


class Writes:
    """What the backend's writer is given, counted by layer, K and V, and head."""

    def __init__(self) -> None:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

        self.write = CPUAttentionBackendImpl.do_kv_cache_update
        CPUAttentionBackendImpl.do_kv_cache_update = lambda *call: self.note(*call)
        self.begin()

    def begin(self) -> None:
        """Count anew."""
        self.tokens, self.calls = Counter[str](), Counter[str]()
        self.codes, self.amax = dict[str, Tensor](), dict[str, Tensor]()  # [2 * H, 256]; [2, H, D]

    def note(self, impl: object, layer: torch.nn.Module, k: Tensor, v: Tensor, *rest: Tensor) -> None:
        """Write K and V [T, K, D], and count it."""
        self.write(impl, layer, k, v, *rest)
        (cache, slots), name = rest, layer.layer_name.removesuffix(".attn")
        if cache.data_ptr() != layer.kv_cache.data_ptr():
            return  # the plugin finds out where a block keeps what
        self.tokens[name] += len(slots)
        self.calls[name] += 1
        amax = torch.stack([x.abs().amax(0).float() for x in (k, v)])
        self.amax[name] = torch.maximum(amax, self.amax.get(name, amax))
        if cache.element_size() == 1:
            _, _, size, width = cache.shape
            scratch = torch.zeros(-(-len(slots) // size), *cache.shape[1:], dtype=torch.uint8)
            self.write(impl, layer, k, v, scratch, torch.arange(len(slots)))
            codes = torch.stack([row.bincount(minlength=256) for row in by_head(scratch).int()])
            codes[:, 0] -= (len(scratch) * size - len(slots)) * width // 2
            self.codes[name] = codes + self.codes.get(name, 0)


def by_head(cache: Tensor) -> Tensor:
    """Return a cache of CPU_ATTN as [2 * H, values]: of each block and head, K's half lies before V's."""
    return cache.view(*cache.shape[:2], 2, -1).permute(2, 1, 0, 3).flatten(2).flatten(0, 1)


class Engine:
    """An engine in this process that watches into `out`, and what its writer is given."""

    def __init__(self, directory: Path, out: Path, **options: object) -> None:
        os.environ |= {"FP8KV_WATCH": str(out), "VLLM_LOGGING_LEVEL": "INFO"}
        logging.getLogger("vllm.fp8kv").addFilter(lambda record: LOG.append(record.getMessage()) or True)
        plugin.register_vllm()
        self.directory, self.out, self.llm = directory, out, start(directory, **SMALL | options)
        (self.runner,) = self.llm.collective_rpc(lambda worker: worker.model_runner)
        self.core, self.writes = self.llm.llm_engine.engine_core.engine_core, Writes()
        self.watch: harvest.Harvest | None = getattr(self.runner, "fp8kv_harvest", None)

    @property
    def files(self) -> harvest.WatchFiles:
        """What the engine's core writes."""
        return self.core.fp8kv_watch

    def begin(self) -> harvest.Harvest:
        """Count anew, as in an engine that has just started."""
        watch = self.runner.fp8kv_harvest = self.watch
        watch._begin()
        watch._next_note = self.files._earliest = self.files._last = 0.0
        self.writes.begin()
        return watch

    def prompts(self, dataset: str, length: int) -> list[list[int]]:
        """Return stretches of a built-in text, as token ids."""
        encode = self.llm.get_tokenizer().encode
        rows = [encode(row)[:length] for _, row in builtin_rows(dataset, length)]
        return [row for row in rows if len(row) == length]

    def write_text(self, rows: list[list[int]], tokens: int = 1) -> None:
        """Read prompts, all at a time, and write so many tokens to each."""
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        options = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        self.llm.generate([{"prompt_token_ids": row} for row in rows], options, use_tqdm=False)

    def text(self) -> str:
        """Return what it writes, greedily, without what it remembers of earlier prompts."""
        self.llm.reset_prefix_cache()
        prompt = "Rome was built on seven hills, and its empire lasted for centuries. Its roads"
        return generate(self.llm, prompt, temperature=0, max_tokens=24, ignore_eos=True).outputs[0].text

    def is_counted(self) -> tuple[bool, str]:
        """Return whether each code that was written was counted once."""
        watch, tokens = self.runner.fp8kv_harvest, {*self.writes.tokens.values()}
        watch.read()
        right = [
            torch.equal(counts.codes.flatten(0, 1), codes) and {counts.tokens, watch.tokens} == tokens
            for counts, codes in zip(watch.counts.values(), self.writes.codes.values(), strict=True)
        ]
        return all(right) and len(right) > 1, f"{tokens} tokens, {len(right)} layers"


def by_name(scales: KVScales) -> dict[str, Tensor]:
    """Name scales, [1] or [K], as engines load them."""
    pairs = product(scales.layers.items(), "kv")
    return {f"{name}.{letter}_scale": getattr(layer, letter) for (name, layer), letter in pairs}
