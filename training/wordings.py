"""The ways to ask for an emoji by its name: those the model is trained on, and those kept for its examination."""

from __future__ import annotations

import random

#: "" twice: a bare name is the commonest way to ask.
BEFORE = (
    *("", "", "a ", "the ", "one ", "emoji of a ", "an emoji of a ", "emoji: ", "picture of a ", "a picture of a "),
    *("image of the ", "an image of a ", "icon of a ", "an icon of the ", "a cute ", "a simple ", "a nice ", "a colorful "),
    *("flat ", "a flat ", "draw a ", "draw the ", "make a ", "paint a ", "create an emoji: ", "i want a "),
    *(
        "give me a ",
        "can you draw a ",
        "generate a ",
        "a drawing of a ",
        "the symbol for ",
        "my favorite ",
        "a big ",
        "clipart of a ",
        "a photo of a ",
    ),
)
AFTER = (
    *("", "", "", " emoji", " icon", " picture", " drawing", ", flat", ", flat design", ", simple", " on white", " please", "!"),
    *(", emoji style", " in bright colors", " for my phone", ", vector art", " as an emoji", ", minimal", "."),
)
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
    said = name if rng.random() < 0.25 else rng.choice(BEFORE) + name + rng.choice(AFTER)
    return said[0].upper() + said[1:] if rng.random() < 0.15 else said


def unseen(name: str, rng: random.Random) -> str:
    return rng.choice(UNSEEN_BEFORE) + name + rng.choice(UNSEEN_AFTER)
