"""Draw the house from the imports: `make pages` writes docs/house-light.svg and -dark.svg."""

from html import escape

from house import ROOT, floors, room_graph

Rooms = dict[str, set[str]]  # the rooms that each imports
Edge = tuple[str, str]
Place = tuple[float, float, float]  # left edge, top and width
Colours = dict[str, str]

PICTURES = {
    ROOT / "docs" / "house-light.svg": {
        "paper": "#ffffff",
        "ink": "#1f2328",
        "line": "#8c959f",
        "room": "#ddf4ff",
    },
    ROOT / "docs" / "house-dark.svg": {
        "paper": "#0d1117",
        "ink": "#e6edf3",
        "line": "#6e7681",
        "room": "#0c2d6b",
    },
}
WIDTH, FLOOR, BOX, LETTER, GAP = 1000, 78, 34, 8.0, 16
TITLE = "Rooms of fp8kv, and what each imports from the floors below"


def needed_edges(rooms: Rooms) -> list[Edge]:
    """Return imports that no longer way explains: `a` to `c` is left out where `a` to `b` to `c` is."""
    return sorted(
        (a, c)
        for a, found in rooms.items()
        for c in found
        if not any(c in below(b, rooms) for b in found - {c})
    )


def below(name: str, rooms: Rooms) -> set[str]:
    """Return all that a room imports, by whatever way."""
    return rooms[name].union(*(below(each, rooms) for each in rooms[name]))


def places(rooms: Rooms, edges: list[Edge]) -> dict[str, Place]:
    """Return left edge, top and width of each room, the lowest floor last; each above what it imports."""
    found: dict[str, Place] = {}
    levels = floors()
    for level, floor in enumerate(levels):
        top = (len(levels) - 1 - level) * FLOOR + GAP
        names = sorted(floor & rooms.keys(), key=lambda name: (_mean(name, edges, found), name))
        widths = [len(name) * LETTER + 2 * GAP for name in names]
        left = (WIDTH - sum(widths) - GAP * (len(names) - 1)) / 2
        for name, width in zip(names, widths, strict=True):
            found[name] = (left, top, width)
            left += width + GAP
    return found


def _mean(name: str, edges: list[Edge], found: dict[str, Place]) -> float:
    centres = [_centre(found[b]) for a, b in edges if a == name and b in found]
    return sum(centres) / len(centres) if centres else WIDTH / 2


def _centre(place: Place) -> float:
    left, _, width = place
    return left + width / 2


def draw(rooms: Rooms, colours: Colours) -> str:
    """Return the SVG: packages filled, single files hollow."""
    edges = needed_edges(rooms)
    where = places(rooms, edges)
    height = len(floors()) * FLOOR
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="ui-monospace, monospace" font-size="13"><title>{escape(TITLE)}</title>',
        f'<rect width="{WIDTH}" height="{height}" fill="{colours["paper"]}"/>',
        *(_line(where[a], where[b], colours) for a, b in edges),
        *(_box(name, where[name], colours) for name in sorted(where)),
        "</svg>\n",
    ])  # fmt: skip


def _line(upper: Place, lower: Place, colours: Colours) -> str:
    x0, y0, x1, y1 = _centre(upper), upper[1] + BOX, _centre(lower), lower[1]
    bend = (y1 - y0) / 2
    path = f"M{x0:.1f} {y0} C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - bend:.1f} {x1:.1f} {y1}"
    return f'<path d="{path}" fill="none" stroke="{colours["line"]}"/>'


def _box(name: str, place: Place, colours: Colours) -> str:
    left, top, width = place
    fill = colours["room" if _is_package(name) else "paper"]
    return (
        f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{BOX}" rx="6" fill="{fill}" '
        f'stroke="{colours["line"]}"/><text x="{_centre(place):.1f}" y="{top + BOX / 2 + 5:.0f}" '
        f'text-anchor="middle" fill="{colours["ink"]}">{escape(name)}</text>'
    )


def _is_package(name: str) -> bool:
    return (ROOT / "calib" / name).is_dir() or (ROOT / name).is_dir()


def main() -> None:
    """Draw it in both colours."""
    rooms = room_graph()
    for path, colours in PICTURES.items():
        path.write_text(draw(rooms, colours))


if __name__ == "__main__":
    main()
