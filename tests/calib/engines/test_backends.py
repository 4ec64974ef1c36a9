"""The catalogue names, for each attention backend, the copies of a scale that it reads."""

import pytest
from pydantic import ValidationError

from calib.engines.catalogue import Engine, find_engine


@pytest.mark.parametrize(
    ("engine", "backend", "write", "read"),
    [
        ("vllm", "CPU_ATTN", ("float",), ("float",)),  # tests/interop/check_copies.py runs it
        ("vllm", "FLASH_ATTN", ("tensor",), ("tensor",)),
        ("vllm", "FLASHINFER", ("tensor",), ("tensor", "float")),
        ("vllm", "ROCM_AITER_FA", ("tensor", "cpu"), ("tensor",)),
        ("sglang", "triton", ("tensor",), ("float",)),
    ],
)
def test_a_backend_reads_its_own_copies(engine, backend, write, read):
    facts = find_engine(engine).backends[backend]
    assert (facts.write, facts.read) == (write, read)


def test_a_copy_that_the_engine_does_not_have_is_refused():
    engine = find_engine("sglang").model_dump() | {"classes": None}
    engine["backends"]["fa3"]["read"] = ["tensor", "cpu"]
    with pytest.raises(ValidationError, match="backend fa3: cpu is not one of tensor, float"):
        Engine.model_validate(engine)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_note_is_part_of_a_sentence(engine):
    for backend in find_engine(engine).backends.values():
        assert not backend.note.endswith(".")
        assert backend.source.endswith(".py")
