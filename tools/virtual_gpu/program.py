"""PTX text as a list of instructions; names that a scope declares get its number, so that all are unique."""

import re
from dataclasses import dataclass, field
from functools import cached_property

SHARED_BASE = 1024  # where a program's shared memory begins, as on GPUs

_COMMENT = re.compile(r"//.*|^\s*\.(loc|file|pragma)\b.*", re.MULTILINE)
_TOKEN = re.compile(r"\s*(?:([{}])|([$\w]+):(?!:)|(\.reg\b[^;]*);|([^;{}]*(?:{[^}]*}[^;{}]*)*);)")
_STATEMENT = re.compile(r"(?:@(!?)([%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_KERNEL = re.compile(r"\.entry\s+(\w+)\s*\(([^)]*)\)[^{]*\.reqntid (\d+)[^{]*({.*)", re.DOTALL)
_WIDTHS = {"pred": 1, "b16": 16, "b32": 32, "b64": 64}
_SIZES = {"u64": 8, "f32": 4, "u32": 4, "u16": 2, "u8": 1, "f64": 8, "b64": 8, "b32": 4}


class FaultError(Exception):
    """What no GPU program may do, or what the interpreter does not know."""


@dataclass(frozen=True)
class Address:
    base: str | None  # a register, or None where the offset says it all
    offset: int


@dataclass
class Instruction:
    """One instruction; operands are names of registers, bits, addresses, or tuples of these."""

    op: str
    operands: tuple
    guard: tuple[str, bool] | None  # register, and what it must be
    text: str

    @cached_property
    def parts(self):
        return self.op.split(".")


@dataclass
class Program:
    threads: int  # of a program
    params: list[tuple[int, int]]  # offset and size of each
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)  # bits of registers
    steps: list = field(default_factory=list)  # what the machine has made of the instructions


def parse(text):
    name, params, threads, rest = _KERNEL.search(_COMMENT.sub("", text)).groups()
    offsets, offset = [], 0
    for kind in re.findall(r"\.param \.(\w+)", params):
        offset = -(-offset // _SIZES[kind]) * _SIZES[kind]
        offsets.append((offset, _SIZES[kind]))
        offset += _SIZES[kind]
    program = Program(int(threads), offsets)
    symbols = {f"{name}_param_{i}": offset for i, (offset, _) in enumerate(offsets)}
    _body(program, rest, symbols | {"global_smem": SHARED_BASE})
    return program


def _body(program, text, symbols):
    scopes, position, number, jumps = [], 0, 0, []
    while token := _TOKEN.match(text, position):
        position = token.end()
        brace, label, registers, statement = token.groups()
        if brace == "{":
            scopes.append({"": number})
            number += 1
        elif brace == "}":
            scopes.pop()
            if not scopes:
                break
        elif label:
            scopes[-1][label] = unique = f"{label}@{scopes[-1]['']}"
            program.labels[unique] = len(program.instructions)
        elif registers:
            _declare(program, registers, scopes)
        elif statement and statement.strip():
            program.instructions.append(_instruction(statement.strip(), scopes, symbols))
            if program.instructions[-1].parts[0] == "bra":
                jumps.append((program.instructions[-1], tuple(scopes)))
    for jump, seen in jumps:  # labels may come after
        jump.operands = (program.labels[_rename(jump.operands[0], seen)],)


def _declare(program, text, scopes):
    _, kind, names = text.split(None, 2)
    for name in map(str.strip, names.split(",")):
        if numbered := re.fullmatch(r"(%\w+)<(\d+)>", name):
            new = [f"{numbered[1]}{i}" for i in range(int(numbered[2]))]
        else:
            scopes[-1][name] = f"{name}@{scopes[-1]['']}"
            new = [scopes[-1][name]]
        program.widths |= dict.fromkeys(new, _WIDTHS[kind.lstrip(".")])


def _rename(name, scopes):
    return next((scope[name] for scope in reversed(scopes) if name in scope), name)


def _instruction(text, scopes, symbols):
    match = _STATEMENT.fullmatch(text)
    if match is None:
        raise FaultError(f"cannot read {text!r}")
    negated, guard, op, rest = match.groups()
    parts = re.split(r"[,|](?![^{\[]*[}\]])", rest)  # commas that no bracket holds
    operands = tuple(_operand(part, scopes, symbols) for part in parts if part.strip())
    guard = (_rename(guard, scopes), not negated) if guard else None
    return Instruction(op, operands, guard, " ".join(text.split()))


def _operand(text, scopes, symbols):
    text = text.strip()
    if text[0] == "{":
        return tuple(_operand(part, scopes, symbols) for part in text[1:-1].split(","))
    if text[0] == "[":
        base, offset = re.fullmatch(r"\[\s*([%$\w]+)\s*(?:\+\s*(-?\w+)\s*)?\]", text).groups()
        base, more = _operand(base, scopes, symbols), int(offset or "0", 0)
        return Address(None, base + more) if isinstance(base, int) else Address(base, more)
    if text in symbols:
        return symbols[text]
    if re.match(r"0[fFdD][0-9a-fA-F]", text):
        return int(text[2:], 16)
    return int(text.rstrip("U"), 0) if re.match(r"-?\d", text) else _rename(text, scopes)
