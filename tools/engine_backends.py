"""Which copies of a KV scale an engine's attention backends compute with, from the sources in its wheels.

engine_backends.py vllm 0.32.0 0.33.0      the copies that each backend's file stores and attends with
engine_backends.py vllm 0.33.0 --check     compare them with the catalogue's; exit 1 if they differ

An engine keeps each scale in several attributes of a layer. A file stores with one where the attribute is an
argument of a call that stores, or is read in a function that does, by name; else it attends with it. What a
file of MLA stores with is in the layer that all of them share; SGLang's pools store what backends hand them,
so of its files only all copies together are compared. Of a wheel, the sources alone are fetched.
"""

import argparse
import ast
import io
import json
import re
import sys
import urllib.request
import zipfile
from pathlib import PurePosixPath

from calib.engines.catalogue import Engine, find_engine

FOLDERS = {"vllm": "vllm/v1/attention/backends/", "sglang": "sglang/srt/layers/attention/"}
STORES = re.compile(
    r"reshape_and_cache|kv_cache_update|set_kv_buffer|rope_kvcache|qk_norm_rope|_store|_insert"
)
Copies = dict[str, set[str]]  # "write" and "read" -> copies


class RemoteFile(io.RawIOBase):
    """A file on a server, of which only what is read is fetched."""

    def __init__(self, url: str) -> None:
        self._url, self._place = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as answer:
            self._size = int(answer.headers["Content-Length"])

    def seekable(self) -> bool:
        """Return True."""
        return True

    def readable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place."""
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def readinto(self, buffer: "memoryview[int]") -> int:  # type: ignore[override]
        """Fetch the next bytes."""
        last = min(self._place + len(buffer), self._size) - 1
        if last < self._place:
            return 0
        request = urllib.request.Request(self._url, headers={"Range": f"bytes={self._place}-{last}"})
        with urllib.request.urlopen(request) as answer:
            content = answer.read()
        buffer[: len(content)] = content
        self._place += len(content)
        return len(content)


def sources(engine: str, version: str) -> dict[str, str]:
    """Return the sources of the attention backends in an engine's wheel on PyPI, by path in their folder."""
    headers = {"Accept": "application/vnd.pypi.simple.v1+json"}
    index = urllib.request.Request(f"https://pypi.org/simple/{engine}/", headers=headers)
    with urllib.request.urlopen(index) as answer:
        files = json.load(answer)["files"]
    names = re.compile(rf"{engine}-{re.escape(version)}-.*(x86_64|any)\.whl")
    urls = [file["url"] for file in files if names.fullmatch(file["filename"])]
    if not urls:
        sys.exit(f"PyPI has no wheel of {engine} {version} for x86-64")
    folder = FOLDERS[engine]
    with zipfile.ZipFile(io.BufferedReader(RemoteFile(urls[0]), 2**18)) as wheel:
        paths = [name for name in wheel.namelist() if name.startswith(folder) and name.endswith(".py")]
        return {name.removeprefix(folder): wheel.read(name).decode() for name in paths}


def copies_of(source: str, attributes: dict[str, str]) -> Copies:
    """Return the copies that a file's code computes with; `attributes` are their names, {x} is k or v."""
    copies = {name.format(x=x): copy for copy, name in attributes.items() for x in "kv"}
    found: Copies = {"write": set(), "read": set()}

    def visit(node: ast.AST, function: str, call: str) -> None:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.Call):
            call = ast.unparse(node.func).rpartition(".")[2]
        name = node.value if isinstance(node, ast.Constant) else ""  # getattr(layer, "k_scale")
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = node.attr if ast.unparse(node.value) in ("layer", "self") else ""
        if isinstance(name, str) and name in copies:
            found["write" if STORES.search(f"{function} {call}") else "read"].add(copies[name])
        for child in ast.iter_child_nodes(node):
            visit(child, function, call)

    visit(ast.parse(source), "", "")
    return found


def differences(engine: Engine, found: dict[str, Copies]) -> list[str]:
    """Return where the catalogue says something else; what MLA stores with is in no backend's own file."""
    lines = []
    for name, backend in engine.backends.items():
        copies = found.get(backend.source)
        if copies is None:
            lines.append(f"{name}: {backend.source} is not there, or reads no scale")
            continue
        if engine.name == "sglang":
            if (both := copies["write"] | copies["read"]) != {*backend.write, *backend.read}:
                lines.append(f"{name}: {sorted(both)}, the catalogue says {backend.write} and {backend.read}")
            continue
        for step, said in (("write", backend.write), ("read", backend.read)):
            of_shared_layer = PurePosixPath(backend.source).parts[0] == "mla"
            own = {*said} - ({"tensor"} if of_shared_layer else set())
            if own != copies[step] - ({"tensor"} if of_shared_layer else set()):
                lines.append(f"{name}: {step} {sorted(copies[step])}, the catalogue says {sorted(said)}")
    return lines


def main() -> None:
    """Print a row for each file, or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=sorted(FOLDERS))
    parser.add_argument("versions", nargs="+")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    is_same = True
    for version in options.versions:
        engine = find_engine(options.engine, version)
        found = {}
        for path, source in sources(options.engine, version).items():
            copies = copies_of(source, engine.scale_copies)
            if copies["write"] or copies["read"]:
                found[path] = copies
        if options.check:
            lines = differences(engine, found)
            is_same &= not lines
            print(
                f"{options.engine} {version}: {len(found)} files, {len(lines)} differences",
                *lines,
                sep="\n  ",
            )
            continue
        for path, copies in found.items():
            steps = (f"{step} {', '.join(sorted(copies[step])) or '-'}" for step in copies)
            print(f"{version} {path}: {'; '.join(steps)}")
    sys.exit(0 if is_same else 1)


if __name__ == "__main__":
    main()
