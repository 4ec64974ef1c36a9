"""The Python examples of the documentation run as they stand."""

import re
from pathlib import Path

import pytest
from test_cli import calibrate

DOCS = Path(__file__).parent.parent / "docs"
EXAMPLES = [
    pytest.param(block, id=f"{page.name}-{i}")
    for page in sorted(DOCS.glob("*.md"))
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example, tiny_directory, tmp_path, monkeypatch):
    assert calibrate(tiny_directory, "-o", tmp_path / "build/demo").exit_code == 0
    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/model").symlink_to(tiny_directory)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "example", "exec"), {})
