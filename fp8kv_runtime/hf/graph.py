"""`RecordedSteps`: decode steps on a GPU as one CUDA graph, replayed, so that Python does not set their pace.

A graph does again what its recording did, at the same addresses, and nothing of Python's: block tables,
lengths and inputs lie in tensors that stay. A model may depend on more than these. So the first replay of
a recording is compared with the model itself, bit for bit; where they differ, and where nothing can be
recorded, every step runs the model.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.utils import ModelOutput

from fp8kv_runtime.cache import PagedSequences
from fp8kv_runtime.errors import MISFITS
from fp8kv_runtime.hf.layers import Fp8CacheLayer
from fp8kv_runtime.hf.rows import CacheRows, is_applied, left_padding

Forward = Callable[..., Any]


class RecordedSteps:
    """The recording of a decoder's steps on one cache, made at the second step of a kind."""

    def __init__(self, decoder: nn.Module) -> None:
        self._config: Any = decoder.config
        self._modules = list(decoder.modules())
        self._can_record = _is_plain(decoder)
        self._key: tuple[Any, ...] | None = None
        self._step: _Step | None = None
        self._is_checked = False

    def run(self, forward: Forward, cache: Cache, rows: CacheRows, kwargs: dict[str, Any]) -> Any:
        """Run the decoder's `forward`, or what a recording of it does."""
        key = self._find_key(cache, rows, kwargs)
        if key is None:
            return forward(**kwargs)
        if key != self._key:
            self._key, self._step = key, None
            return forward(**kwargs)
        if self._step is None:
            step, self._is_checked = _Step(rows, kwargs), False
            output = step.run(forward, rows, kwargs)
            self._can_record = step.record(forward, cache, rows, kwargs, output)
            self._step = step if self._can_record else None
            return output
        output = self._step.replay(cache, rows, kwargs)
        if not self._is_checked:
            replayed, output = output, self._step.run(forward, rows, kwargs)
            self._is_checked = self._can_record = all(
                torch.equal(x, output[name]) for name, x in replayed.items() if isinstance(x, Tensor)
            )
        return output

    def _find_key(self, cache: Cache, rows: CacheRows, kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Return what a recording depends on besides the values that it reads; None: nothing is recorded."""
        if not (self._can_record and rows.use_triton and rows.is_step):
            return None
        mask, inputs = kwargs.get("attention_mask"), _inputs(kwargs)
        options = [(name, x) for name, x in kwargs.items() if not isinstance(x, Tensor) and x is not cache]
        if (
            "position_ids" not in inputs
            or not all(map(rows.waits, inputs.values()))
            or not all(x is None or isinstance(x, bool) for _, x in options)
            or not (mask is None or mask.shape == (rows.num_rows, rows.length))
            # what other layers keep beside K and V, a step may write, and a second one again
            or not all(type(layer) is Fp8CacheLayer for layer in cache.layers)
            or any(m._forward_hooks or m._forward_pre_hooks for m in self._modules)
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled()
        ):
            return None
        return (
            rows.cache.num_blocks, rows.num_rows, rows.is_padded, mask is None, rows.table_width, options,
            [(name, x.shape, x.dtype, x.device) for name, x in inputs.items()],
            [getattr(self._config, name, None) for name in ("output_hidden_states", "output_attentions")],
            str(self._config._attn_implementation),
            [p.data_ptr() for m in self._modules for p in m._parameters.values() if p is not None],
        )  # fmt: skip


def _is_plain(decoder: nn.Module) -> bool:
    """Return whether a decoder's steps depend on positions and lengths alone, and lie on one device.

    Chunked attention (Llama 4) depends on the length by a number of Python's, adapters by a switch.
    """
    kinds = {(type(p.data), p.device) for p in decoder.parameters()}
    types = set(getattr(decoder.config, "layer_types", None) or ())
    moved = any(hasattr(m, "_hf_hook") or hasattr(m, "base_layer") for m in decoder.modules())
    is_on_one = len(kinds) == 1 and kinds.pop()[0] is Tensor
    return is_on_one and not moved and types <= {"full_attention", "sliding_attention"}


class _Step:
    """Tensors of a step that stay, and the graph that reads and writes them."""

    def __init__(self, rows: CacheRows, kwargs: Mapping[str, Any]) -> None:
        device, shape = kwargs["position_ids"].device, (rows.num_rows,)
        with torch.inference_mode(False):  # or other modes could not write to what this makes
            self._inputs = {name: torch.zeros_like(x) for name, x in _inputs(kwargs).items()}
            tables, lengths, starts = (
                torch.zeros(size, dtype=torch.int32, device=device)
                for size in ((*shape, rows.table_width), shape, shape)
            )
            self._slots = torch.zeros(shape, dtype=torch.int64, device=device)
        self._sequences = PagedSequences(tables, lengths, starts if rows.is_padded else None)
        self._copied_tables = torch.empty(0)  # those on the host that were copied last
        self._output_type: type[ModelOutput] = ModelOutput
        self._output: dict[str, Tensor | None] = {}  # None: the cache, which is not to be kept alive here
        self._replay: Callable[[], None]

    def run(self, forward: Forward, rows: CacheRows, kwargs: Mapping[str, Any]) -> Any:
        """Run the model on this step's tables: shorter ones may be split otherwise, and give other bits."""
        self._write(rows, kwargs)
        rows.set_lengths(rows.length - 1)
        rows.use(self._sequences, self._slots)
        return forward(**kwargs)

    def record(
        self, forward: Forward, cache: Cache, rows: CacheRows, kwargs: dict[str, Any], output: object
    ) -> bool:
        """Record what gave `output`; return whether that was possible."""
        if not isinstance(output, ModelOutput):
            return False
        if not all(isinstance(x, Tensor) or x is cache for x in output.values()):
            return False
        arguments = kwargs | self._inputs
        if "attention_mask" in kwargs:
            arguments["attention_mask"] = None  # it grows; `replay` compares it with what the kernels apply
        rows.set_lengths(rows.length - 1)
        rows.is_recorded = True
        try:
            self._replay, recorded = capture(lambda: forward(**arguments), self._slots.device)
        except MISFITS:  # a model waits for the GPU, which a graph cannot, or wants a mask
            return False
        finally:
            rows.is_recorded = False
            rows.set_lengths(rows.length)
        self._output_type = type(recorded)
        self._output = {name: None if x is cache else x for name, x in recorded.items()}
        return True

    def replay(self, cache: Cache, rows: CacheRows, kwargs: Mapping[str, Any]) -> ModelOutput:
        """Do what was recorded with these inputs."""
        self._write(rows, kwargs)
        if (mask := kwargs.get("attention_mask")) is not None:
            rows.note(is_applied(mask, 1, self._sequences.seq_starts, None))
        self._replay()
        rows.set_lengths(rows.length)
        return self._output_type(
            **{name: cache if x is None else x.clone() for name, x in self._output.items()}
        )

    def _write(self, rows: CacheRows, kwargs: Mapping[str, Any]) -> None:
        """Copy this step's values to the tensors that stay."""
        tables, slots = rows.host_tables()
        sequences = self._sequences
        if not torch.equal(tables.block_tables, self._copied_tables):
            self._copied_tables = tables.block_tables
            sequences.block_tables[:, : self._copied_tables.shape[1]].copy_(
                self._copied_tables, non_blocking=True
            )
        sequences.seq_lens.copy_(tables.seq_lens, non_blocking=True)
        self._slots.copy_(slots, non_blocking=True)
        if sequences.seq_starts is not None:
            sequences.seq_starts.copy_(left_padding(kwargs["attention_mask"]))
        for name, x in self._inputs.items():
            x.copy_(kwargs[name])


def capture(run: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """Record what `run` launches, without doing it; return how to do it, and what `run` returned."""
    with torch.cuda.device(device):
        graph, stream, current = torch.cuda.CUDAGraph(), _stream(device), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # not torch.cuda.graph, which gives all free memory back first
            graph.capture_begin(capture_error_mode="thread_local")
            with ExitStack() as broken:
                broken.callback(_break_off, graph)
                output = run()
                broken.pop_all()
            graph.capture_end()
        current.wait_stream(stream)
    return graph.replay, output


def _break_off(graph: torch.cuda.CUDAGraph) -> None:
    with suppress(RuntimeError):  # of a recording that is broken already
        graph.capture_end()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _inputs(kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a step, without the mask."""
    return {name: x for name, x in kwargs.items() if isinstance(x, Tensor) and name != "attention_mask"}
