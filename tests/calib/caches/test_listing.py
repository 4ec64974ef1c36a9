"""docs/caches.md says what the facts say."""

from pathlib import Path

from calib.caches.listing import tables
from calib.caches.types import ALL_CACHES, cache_type

PAGE = Path(__file__).parents[3] / "docs" / "caches.md"


def rows(text):
    return [line for line in text.splitlines() if line.startswith("|")]


def test_the_page_has_the_tables():
    assert rows(PAGE.read_text()) == rows(tables())


def test_every_type_and_serving_has_a_row():
    types = [cache_type(name) for name in ALL_CACHES]
    count = len(types) + sum(len(kind.servings) for kind in types)
    assert len(rows(tables())) == count + 2 * 2  # each table's titles and line
    assert "| `nvfp4` | NVFP4" in tables()
    assert "| 4.5 | 4.5 | - |" in tables()
    assert "| - | - | 9.11 |" in tables()  # 656 bytes for 576 values
    assert "| `int8_per_token_head` | vllm 0.32 | `--kv-cache-dtype int8_per_token_head` |" in tables()
