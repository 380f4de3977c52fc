"""Generate the training text of the bundled demo model.

Every story is told by a small program: a plot (one of some thirty) walks through its steps with a hero,
a friend, a helper, an object and a place, and each step has several wordings.  Nothing is copied from
anywhere.  The same seed always gives the same text.

The held-out split differs from the training split twice over: it uses other seeds, and every
(character, object, place) combination in it is one that the training split never contains.

    python tools/demo/corpus.py --split train --count 5
"""

from __future__ import annotations

import argparse
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import story_chat as chat
import story_plots_adventures  # noqa: F401  (importing registers the plots)
import story_plots_friends  # noqa: F401
import story_plots_things  # noqa: F401
import story_words as words
from story_state import PLOTS, Character, Plot, Story, tell_closing, tell_opening

Split = Literal["train", "heldout"]
HELDOUT_PERCENT = 10
CHAT_SHARE = 0.22


@dataclass(frozen=True)
class Document:
    """Either a plain story (``turns`` empty) or a conversation of (user, assistant) turns."""

    text: str
    turns: tuple[tuple[str, str], ...] = ()


def is_heldout(character: str, item: str, place: str) -> bool:
    """Whether a combination belongs to the held-out split (a fixed tenth of all combinations)."""
    return zlib.crc32(f"{character}|{item}|{place}".encode()) % 100 < HELDOUT_PERCENT


def _animal(rng: random.Random, kinds: list[str]) -> Character:
    female = rng.random() < 0.5
    return Character(rng.choice(words.ANIMAL_GIRLS if female else words.ANIMAL_BOYS), rng.choice(kinds), female)


def _human(rng: random.Random) -> Character:
    female = rng.random() < 0.5
    royal = rng.random() < 0.1
    kind = ("princess" if royal else "girl") if female else ("prince" if royal else "boy")
    return Character(rng.choice(words.GIRLS if female else words.BOYS), kind, female)


def _cast(rng: random.Random) -> tuple[Character, Character]:
    """A hero and a friend: two children, or two animals of different species."""
    if rng.random() < 0.5:
        hero = _human(rng)
        while (friend := _human(rng)).name == hero.name or friend.kind in ("princess", "prince"):
            pass
        return hero, friend
    hero = _animal(rng, list(words.SPECIES))
    others = [kind for kind in words.SPECIES if kind not in (hero.kind, "dragon")]
    while (friend := _animal(rng, others)).name == hero.name:
        pass
    return hero, friend


def make_story(rng: random.Random, split: Split) -> tuple[Story, str]:
    """One story of the given split, with its final state."""
    while True:
        plot: Plot = rng.choice(PLOTS)
        hero, friend = _cast(rng)
        item = rng.choice(plot.objects)
        place = rng.choice(plot.places)
        if is_heldout(hero.name, item, place.noun) == (split == "heldout"):
            break
    story = Story(rng, plot, hero, friend, item, place)
    tell_opening(story)
    plot.tell(story)
    tell_closing(story)
    return story, story.text()


def documents(split: Split, seed: int = 0) -> Iterator[Document]:
    """An endless, deterministic stream of documents."""
    rng = random.Random(f"{split}-{seed}")
    while True:
        story, text = make_story(rng, split)
        if rng.random() < CHAT_SHARE:
            yield Document("", chat.conversation(rng, story, text))
        else:
            yield Document(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", choices=("train", "heldout"), default="train")
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    stream = documents(args.split, args.seed)
    for _ in range(args.count):
        document = next(stream)
        for user, assistant in document.turns:
            print(f"USER: {user}\nASSISTANT: {assistant}\n")
        print(document.text, end="\n\n" + "-" * 40 + "\n\n")


if __name__ == "__main__":
    main()
