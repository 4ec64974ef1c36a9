"""Pictures that are drawn at run time, from a seed: charts, pages of text, noise as of photos, gradients."""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageDraw
from PIL.Image import Image as Picture

_SIZES = (224, 336, 448)  # of each side: processors cut pictures into tiles by their shape


def picture_rows(passages: list[str], numbers: range) -> Iterator[dict[str, object]]:
    """Yield a picture and a question for each of a few passages, with the passage as the answer."""
    for number in numbers:
        draw, question = _KINDS[number % len(_KINDS)]
        passage = passages[number % len(passages)]
        generator = np.random.default_rng(number)
        width, height = (int(size) for size in generator.choice(_SIZES, 2))
        yield {"image": draw(generator, width, height, passage), "text": f"{question}\n\n{passage}"}


def _chart(generator: Generator, width: int, height: int, passage: str) -> Picture:
    picture = Image.new("RGB", (width, height), "white")
    draw, bars = ImageDraw.Draw(picture), int(generator.integers(3, 9))
    step = (width - 40) // bars
    for number, share in enumerate(generator.uniform(0.1, 1, bars)):
        left, top = 30 + number * step, height - 20 - int(share * (height - 50))
        color = tuple(int(x) for x in generator.integers(0, 256, 3))
        draw.rectangle((left, top, left + step * 2 // 3, height - 20), fill=color)
        draw.text((left, top - 12), f"{share:.0%}", fill="black")
    draw.line((25, 10, 25, height - 20, width - 5, height - 20), fill="black", width=2)
    return picture


def _page(generator: Generator, width: int, height: int, passage: str) -> Picture:
    picture = Image.new("RGB", (width, height), "ivory")
    printable = "\n".join(passage.splitlines()[: height // 12]).encode("ascii", "replace").decode()
    ImageDraw.Draw(picture).multiline_text((8, 4), printable, fill="black", spacing=2)
    return picture


def _noise(generator: Generator, width: int, height: int, passage: str) -> Picture:
    """Draw noise of halved sizes and strengths: large shapes and fine grain, as in photos."""
    total = np.zeros((height, width, 3))
    for octave in range(6):
        coarse = generator.uniform(0, 255, (3 * 2**octave, 3 * 2**octave, 3)).astype(np.uint8)
        smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        total += np.asarray(smooth, np.float64) / 2 ** (octave + 1)
    return Image.fromarray(total.clip(0, 255).astype(np.uint8))


def _gradient(generator: Generator, width: int, height: int, passage: str) -> Picture:
    start, across, down = generator.uniform(0, 255, (3, 3))
    x, y = np.linspace(0, 1, width)[None, :, None], np.linspace(0, 1, height)[:, None, None]
    return Image.fromarray(((start * (1 - x) + across * x) * (1 - y) + down * y).astype(np.uint8))


_KINDS: tuple[tuple[Callable[[Generator, int, int, str], Picture], str], ...] = (
    (_chart, "What does this chart show? Name the largest bar."),
    (_page, "What is written here? Read it to me, and go on."),
    (_noise, "What do you see in this photo? Describe its parts."),
    (_gradient, "Which colours does this picture have, and where?"),
)
