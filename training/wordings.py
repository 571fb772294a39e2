"""The ways to ask for an emoji by its name: those the model is trained on, and those kept for its examination.

Trained ones are put together from parts, with words in between that mean nothing: so the model learns to look for the name.
"""

from __future__ import annotations

import random
from pathlib import Path

ASKING = (
    *("draw", "make", "paint", "create", "generate", "give me", "i want", "i need", "i would like", "can you draw"),
    *("please draw", "let me have", "produce", "design", "find", "imagine", "print", "get me", "how about", "think of"),
    *("this is", "use", "send me", "here is", "will you make", "may i have", "try", "compose", "search", "do you have", "add"),
    *("choose", "put", "bring", "my"),
)
ARTICLES = ("", "a", "a", "the", "the", "an", "one", "some", "another", "that", "this")
ADJECTIVES = (
    *("cute", "simple", "nice", "colorful", "flat", "big", "huge", "beautiful", "pretty", "plain", "bright", "modern", "funny"),
    *("minimal", "fancy", "cool", "classic", "sweet", "favorite", "wonderful", "elegant", "typical", "charming", "perfect"),
    *("new", "gorgeous", "detailed", "amazing", "shiny", "playful", "friendly", "retro", "realistic", "glossy", "bold", "soft"),
    *("good",),
)
KINDS = (
    *("emoji", "picture", "image", "icon", "drawing", "symbol", "photo", "clipart", "painting", "graphic", "depiction"),
    *("version", "avatar", "portrait", "poster", "doodle", "vector", "figure", "thumbnail", "stamp", "print", "artwork"),
    *("view", "emblem", "mosaic", "design", "sign", "button", "mark", "card", "preview", "example", "model", "shape", "study"),
    *("snapshot",),
)
ENDS = (
    *(", flat", ", flat design", ", simple", " on white", " please", "!", ", emoji style", " in bright colors"),
    *(" for my phone", ", vector art", ", minimal", ".", " for me", " in watercolor", ", detailed", " for the party"),
    *(" of course", ", smooth", " in the middle", " on a wall", ", soft light", " in two colors", " for an app", ", modern"),
    *(" if you can", ", sharp", " now"),
)
#: Which say nothing about a picture.
FILLERS = (Path(__file__).parent / "fillers.txt").read_text().split()
#: Never trained on. Of their words only "a", "an", "the", "of", "in", "for" and "me" occur above.
UNSEEN_BEFORE = (
    *("show me the ", "a tiny ", "an illustration of a ", "sketch of a ", "sticker: ", "invent a lovely ", "render the "),
    *("could we see the ", "a cartoon of the ", "logo with a ", "pictogram of a ", "little "),
)
UNSEEN_AFTER = (
    *("", " sticker", " badge", ", clean lines", " against a pale background", ", high quality", " thanks", ", vivid"),
    *(" in cartoon form", ", centered", " for a website", " glyph"),
)


def trained(name: str, rng: random.Random) -> str:
    """Now and then words of the name are left out, so that "heart" alone draws a heart of some colour."""
    words = name.split()
    if len(words) > 1 and rng.random() < 0.1:
        kept = sorted(rng.sample(range(len(words)), rng.randint(1, len(words) - 1)))
        name = " ".join(words[i] for i in kept)
    said = name if rng.random() < 0.4 else _before(rng) + name + _after(rng)
    return said[0].upper() + said[1:] if rng.random() < 0.15 else said


def _before(rng: random.Random) -> str:
    kind = rng.choice(KINDS)
    said = [
        *_fillers(rng, 0.2),
        rng.choice(ASKING) if rng.random() < 0.4 else "",
        rng.choice(ARTICLES),
        rng.choice(ADJECTIVES) if rng.random() < 0.35 else "",
        rng.choice((f"{kind} of", f"{kind} of", f"{kind}:", f"{kind} for")) if rng.random() < 0.45 else "",
        *_fillers(rng, 0.15),
        rng.choice(ARTICLES),
        rng.choice(ADJECTIVES) if rng.random() < 0.25 else "",
    ]
    return "".join(f"{word} " for word in said if word)


def _after(rng: random.Random) -> str:
    said = "".join(f" {word}" for word in _fillers(rng, 0.25))
    if rng.random() < 0.45:
        said = f" {rng.choice(KINDS)}{said}"
    for _ in range(2):
        if rng.random() < 0.4:
            said += rng.choice(ENDS)
    return said


def _fillers(rng: random.Random, chance: float) -> list[str]:
    """One to three words of no meaning, a third of them no words at all."""
    count = rng.choice((1, 1, 2, 3)) if rng.random() < chance else 0
    return [_invented(rng) if rng.random() < 0.35 else rng.choice(FILLERS) for _ in range(count)]


def _invented(rng: random.Random) -> str:
    """As "gurdan"."""
    ends = ("", "", "n", "r", "st", "l")
    return "".join(rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") + rng.choice(ends) for _ in range(rng.randint(1, 3)))


def unseen(name: str, rng: random.Random) -> str:
    return rng.choice(UNSEEN_BEFORE) + name + rng.choice(UNSEEN_AFTER)
