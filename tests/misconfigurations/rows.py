"""Rows as people have them, the same at each call; pictures are drawn below the folder of the set-up."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from PIL import Image, ImageDraw

from tests.misconfigurations.base import Row

COLOURS = ["red", "blue", "green", "orange", "purple", "black"]
WIDTH, HEIGHT = 640, 480
"""Of a screenshot, in pixels."""


def _canvas(size: tuple[int, int] = (112, 84)) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", size, "white")
    return image, ImageDraw.Draw(image)


def _save(image: Image.Image, folder: Path, name: str) -> str:
    (folder / "images").mkdir(exist_ok=True)
    image.save(folder / "images" / f"{name}.png")
    return f"images/{name}.png"


def arithmetic(count: int = 20, seed: int = 1) -> list[Row]:
    """Word problems with a worked solution; the answer is a whole number as text."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        price, number, paid = rng.randint(3, 19), rng.randint(2, 12), rng.randint(240, 400)
        total = price * number
        rows.append(
            {
                "problem": f"A notebook costs {price} coins. Mia buys {number} of them and pays with {paid} coins. "
                "How many coins does she get back?",
                "answer": str(paid - total),
                "solution": f"The notebooks cost {price} \\times {number} = {total} coins. She gets back "
                f"{paid} - {total} = {paid - total} coins. The answer is $\\boxed{{{paid - total}}}$.",
            }
        )
    return rows


def fractions(count: int = 16, seed: int = 2) -> list[Row]:
    """A probability; `answer` is LaTeX, `decimal` the same number."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        below = rng.choice([4, 5, 8, 10, 16, 20])
        above = rng.choice([n for n in range(1, below) if n % 2 and (below % 5 or n % 5)])
        rows.append(
            {
                "problem": f"A bag holds {below} marbles, {above} of which are red. One is drawn at random. "
                "What is the probability that it is red?",
                "answer": f"\\frac{{{above}}}{{{below}}}",
                "decimal": above / below,
            }
        )
    return rows


def amounts(count: int = 18, seed: int = 3) -> list[Row]:
    """Totals of some hundreds to some ten thousands, as plain whole numbers."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        months, rent = rng.randint(3, 24), rng.randint(20, 45) if i % 3 == 0 else rng.randint(410, 1900)
        problem = f"The rent of a locker room is {rent} dollars a month. How many dollars are paid in {months} months?"
        rows.append({"problem": problem, "answer": str(months * rent)})
    return rows


def geometry(folder: Path, count: int = 14, seed: int = 4) -> list[Row]:
    """Areas of right triangles with the legs written at them."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        a, b = 2 * rng.randint(2, 12), rng.randint(3, 25)
        image, draw = _canvas()
        draw.polygon([(20, 10), (20, 66), (90, 66)], outline="black")
        draw.text((4, 34), str(a), "black")
        draw.text((50, 68), str(b), "black")
        problem = "<image>The legs of the right triangle are given in cm. Find its area in square centimetres."
        rows.append({"problem": problem, "answer": str(a * b // 2), "images": [_save(image, folder, f"geo{i}")]})
    return rows


def hypotenuses(folder: Path, count: int = 15, seed: int = 5) -> list[Row]:
    """Hypotenuses, never whole, in full precision."""
    rng = random.Random(seed)
    rows = geometry(folder, count, seed)
    for row in rows:
        a, b = rng.choice([(2, 3), (4, 5), (1, 2), (5, 7), (3, 8), (6, 7)])
        row["problem"] = f"<image>A right triangle like the one shown has legs {a} and {b}. How long is the hypotenuse?"
        row["answer"] = (a * a + b * b) ** 0.5
    return rows


def charts(folder: Path, count: int = 16, seed: int = 6) -> list[Row]:
    """Bars of two colours and the share of one in per cent, a whole number."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        share, (one, other) = rng.randint(1, 19) * 5, rng.sample(COLOURS, 2)
        image, draw = _canvas()
        draw.rectangle((25, 80 - share * 0.7, 45, 80), fill=one)
        draw.rectangle((65, 80 - (100 - share) * 0.7, 85, 80), fill=other)
        draw.text((25, 2), str(share), "black")
        draw.text((65, 2), str(100 - share), "black")
        problem = f"<image>The bars show {one} and {other} cars. What percentage of the cars is {one}?"
        rows.append({"problem": problem, "answer": str(share), "images": [_save(image, folder, f"chart{i}")]})
    return rows


def counting(folder: Path, count: int = 20, seed: int = 7) -> list[Row]:
    """Numbers of dots of a colour, as text."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        colour, number = rng.choice(COLOURS), rng.randint(1, 12)
        image, draw = _canvas()
        for place in rng.sample(range(24), number):
            x, y = 6 + place % 6 * 17, 6 + place // 6 * 19
            draw.ellipse((x, y, x + 10, y + 10), fill=colour)
        problem = f"<image>How many {colour} dots are in the picture?"
        rows.append({"problem": problem, "answer": str(number), "images": [_save(image, folder, f"dots{i}")]})
    return rows


def choices(folder: Path, count: int = 18, seed: int = 8) -> list[Row]:
    """The colour of a shape out of four options; `answer` is the letter, `option` its text."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        options = rng.sample(COLOURS, 4)
        right = rng.randrange(4)
        image, draw = _canvas()
        draw.rectangle((30, 20, 80, 60), fill=options[right])
        listed = "\n".join(f"{letter}. {option}" for letter, option in zip("ABCD", options, strict=True))
        rows.append(
            {
                "problem": f"<image>What is the colour of the rectangle?\n{listed}",
                "answer": "ABCD"[right],
                "option": options[right],
                "images": [_save(image, folder, f"choice{i}")],
            }
        )
    return rows


def several_choices(folder: Path, count: int = 16, seed: int = 9) -> list[Row]:
    """All options that apply, as letters with commas; in half of the rows there is one."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        options = rng.sample(COLOURS, 4)
        right = sorted(rng.sample(range(4), 1 if i % 2 else rng.randint(2, 3)))
        image, draw = _canvas()
        for k in right:
            draw.ellipse((4 + k * 26, 30, 24 + k * 26, 50), fill=options[k])
        listed = "\n".join(f"{letter}. {option}" for letter, option in zip("ABCD", options, strict=True))
        rows.append(
            {
                "problem": f"<image>Which of these colours appear in the picture? Name all that apply.\n{listed}",
                "answer": ",".join("ABCD"[k] for k in right),
                "images": [_save(image, folder, f"several{i}")],
            }
        )
    return rows


def yes_no(folder: Path, count: int = 20, seed: int = 10, share_of_yes: float = 0.5) -> list[Row]:
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        yes = i < count * share_of_yes
        shown, other = rng.sample(COLOURS, 2)
        image, draw = _canvas()
        draw.polygon([(56, 10), (20, 70), (92, 70)], fill=shown)
        rows.append(
            {
                "problem": f"<image>Is the triangle {shown if yes else other}?",
                "answer": "Yes" if yes else "No",
                "images": [_save(image, folder, f"yesno{i}")],
            }
        )
    rng.shuffle(rows)
    return rows


def boxes(folder: Path, count: int = 14, seed: int = 11) -> list[Row]:
    """A button on a screenshot of 640 × 480; the answer is [x1, y1, x2, y2] in pixels."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        x, y, w, h = rng.randint(180, 480), rng.randint(120, 380), rng.randint(60, 130), rng.randint(30, 70)
        name = rng.choice(["Save", "Cancel", "Search", "Send", "Log in", "Next"])
        image, draw = _canvas((WIDTH, HEIGHT))
        draw.rectangle((0, 0, WIDTH, 24), fill="lightgrey")
        draw.rectangle((x, y, x + w, y + h), fill="lightblue", outline="black")
        draw.text((x + 8, y + 8), name, "black")
        rows.append(
            {
                "problem": f'<image>Where on this screenshot ({WIDTH} x {HEIGHT} pixels) is the button "{name}"?',
                "answer": [x, y, x + w, y + h],
                "images": [_save(image, folder, f"screen{i}")],
            }
        )
    return rows


def signs(folder: Path, count: int = 16, seed: int = 12) -> list[Row]:
    """Words to read."""
    words = ["Open", "Closed", "Exit", "Platform 4", "No parking", "Bakery", "Sale", "Push", "Fire door", "Main St"]
    rows = []
    for i, word in zip(range(count), _endless(words, seed), strict=False):
        image, draw = _canvas()
        draw.rectangle((6, 24, 106, 58), outline="black")
        draw.text((14, 34), word, "black")
        row = {
            "problem": "<image>What does the sign say?",
            "answer": word,
            "images": [_save(image, folder, f"sign{i}")],
        }
        rows.append(row)
    return rows


def lengths(count: int = 15, seed: int = 13) -> list[Row]:
    """Distances; the answer is a number and a unit."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        speed, hours = rng.randint(4, 90), rng.randint(2, 9)
        problem = f"A boat moves at {speed} km per hour for {hours} hours. How far does it get, in km?"
        rows.append({"problem": problem, "answer": f"{speed * hours} km"})
    return rows


def chinese(count: int = 16, seed: int = 14) -> list[Row]:
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        each, bags, eaten = rng.randint(3, 12), rng.randint(2, 9), rng.randint(1, 5)
        problem = f"小明有{bags}袋苹果，每袋{each}个，吃掉了{eaten}个。还剩多少个苹果？"
        rows.append({"problem": problem, "answer": str(each * bags - eaten)})
    return rows


def captions(folder: Path, count: int = 12, seed: int = 15) -> list[Row]:
    """Pictures to describe; the answer is a JSON text with the words that a description should hold."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        one, other = rng.sample(COLOURS, 2)
        image, draw = _canvas()
        draw.ellipse((10, 20, 50, 60), fill=one)
        draw.rectangle((62, 20, 102, 60), fill=other)
        rows.append(
            {
                "problem": "<image>Describe the picture in one sentence.",
                "answer": f'["{one}", "circle", "{other}", "square"]',
                "images": [_save(image, folder, f"caption{i}")],
            }
        )
    return rows


def _endless(words: list[str], seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    while True:
        yield from rng.sample(words, len(words))
