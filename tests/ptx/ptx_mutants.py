"""PTX with one instruction wrong."""

import re

# what is looked for, and what takes its place; where it names an instruction, that is gone
KINDS = {
    "barrier": (r"\bbar\.(?:sync\s+0|warp\.sync\s+-1);", ""),
    "wait": (r"cp\.async\.wait_group\s+(\d+);", lambda m: f"cp.async.wait_group {int(m[1]) + 1};"),
    "group": (r"cp\.async\.commit_group;", ""),
    "copy": (r"(cp\.async\.c\w\.[^;]*, 0x[0-9a-f]+), %r\d+;", lambda m: f"{m[1]}, 0;"),
    "prmt": (r"(prmt\.b32 [^;]*, )0x(\w+?)(U?);", lambda m: f"{m[1]}0x{_swapped(m[2])}{m[3]};"),
    "lop3": (r"(lop3\.b32 [^;]*, )0x(\w+);", lambda m: f"{m[1]}{int(m[2], 16) ^ 0x10:#x};"),
    "mask": (r"setp\.(lt|le|gt|ge)\.(s\d)", lambda m: f"setp.{_OFF_BY_ONE[m[1]]}.{m[2]}"),
    # of sums: a maximum of fewer values is an origin of the softmax that is as good
    "shuffle": (
        r"(shfl\.sync\.bfly\.b32 [^;]*, )(\d+)(, 31, -1;\s*(?:[$.][^\n]*\s*)*add)",
        lambda m: f"{m[1]}0{m[3]}",
    ),
    "matrix": (
        r"(ldmatrix[^;]*\{%r\d+, )(%r\d+), (%r\d+)(, %r\d+\})",
        lambda m: f"{m[1]}{m[3]}, {m[2]}{m[4]}",
    ),
    "fence": (r"fence\.proxy\.async[^;]*;", ""),
    "matrix wait": (r"wgmma\.wait_group[^;]*;|tcgen05\.wait::(?:ld|st)[^;]*;", ""),
    "mbarrier wait": (r"mbarrier\.try_wait[^;]*;\s*@!complete bra\.uni waitLoop;", ""),
}  # fmt: skip
_BARRIER, _BRANCH = r"bar\.(?:warp\.)?sync", r"\bbra\b|\$L__BB"
_OFF_BY_ONE = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}


def _separates(text, match):
    """Whether shared memory is used on both sides, before the barriers next to this one."""
    before = ["", *re.split(f"({_BARRIER}|{_BRANCH})", text[: match.start()])][-2:]
    after = [*re.split(f"({_BARRIER}|{_BRANCH})", text[match.end() :]), ""][1::-1]
    return all("shared" in side or not re.match(_BARRIER, end) for end, side in (before, after))


def _ends_a_group(text, match):
    """Whether a wait tells this group from the next one: not where all waits are for all."""
    follows = re.search(r"cp\.async\.(commit|wait)_group|\bbra\b", text[match.end() :])
    waits = re.findall(r"cp\.async\.wait_group\s+(\d+)", text)
    return set(waits) != {"0"} or not (follows and follows[1] == "commit")


def _shows_new_data(text, match):
    """Whether something was stored since the fence before, or where a loop begins between."""
    before = re.split(r"fence\.proxy", text[: match.start()])[-1]
    jumps = re.findall(r"\bbra\S*\s+(\$L\w+);", text[match.end() :])  # none of a wait's own
    stored = re.search(r"st\.shared|stmatrix|cp\.async\.c\w\.", before)
    return stored is not None or any(f"{label}:" in before for label in jumps)


def _waited_for_later(text, match):
    """Whether the next wait of this kind comes before anything that this one could be for."""
    after = text[match.end() :].split(match[0].partition(".sync")[0], 1)
    used = re.search(r"st\.shared|stmatrix|tcgen05\.mma|\bbra\b|\$L__BB", after[0])
    return len(after) == 2 and used is None


def _swapped(selector):
    """The last two digits the other way round; of bytes picked alike, the next bytes."""
    if len(set(selector[-2:])) == 1:
        return selector[:-1] + f"{int(selector[-1], 16) ^ 1:x}"
    return selector[:-2] + selector[-1] + selector[-2]


def _tells_of_new(text, match):
    """Whether matrix instructions ran since the wait before, which tells of all that began."""
    return "tcgen05.mma" in text[: match.start()].rpartition("mbarrier.try_wait")[2]


MATTERS = {
    "barrier": _separates,
    "group": _ends_a_group,
    "fence": _shows_new_data,
    "matrix wait": lambda text, match: not _waited_for_later(text, match),
    "mbarrier wait": _tells_of_new,
}


def mutants(text: str, kind: str, most: int):
    """Name and PTX of at most `most` mutants of a kind, evenly spread over the kernel.

    Left out is what cannot matter: `MATTERS`; and the plan of the parts, which bisects: its steps
    make up for one another but for few lengths (`test_split.py`).
    """
    pattern, new = KINDS[kind]
    found, plan = list(re.finditer(pattern, text)), re.search(r'\.file\s+(\d+)\s+"[^"]*split\.py"', text)
    if kind in MATTERS:
        found = [match for match in found if MATTERS[kind](text, match)]
    if plan:
        files = {match: re.findall(r"\.loc\s+(\d+)", text[: match.start()])[-1:] for match in found}
        found = [match for match in found if files[match] != [plan[1]]]
    step = max(1, -(-len(found) // most))
    for number, match in enumerate(found[::step]):
        line = " ".join(text[match.start() :].split(";")[0].split())
        changed = text[: match.start()] + (new(match) if callable(new) else new) + text[match.end() :]
        yield f"{kind} {number * step} {line[:60]}", changed
