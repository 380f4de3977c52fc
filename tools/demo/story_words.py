"""The words the demo stories are made of: characters, objects, places and traits.

Everything here is plain data.  The lists are kept short on purpose: a model with two million weights
learns a thousand common words well, and ten thousand rare ones badly.
"""

from __future__ import annotations

from dataclasses import dataclass

GIRLS = (
    "Lily",
    "Mia",
    "Anna",
    "Rosa",
    "Emma",
    "Zoe",
    "Ella",
    "Nora",
    "Sara",
    "Lucy",
    "Amy",
    "Maya",
)
BOYS = (
    "Tom",
    "Ben",
    "Sam",
    "Leo",
    "Max",
    "Tim",
    "Jack",
    "Noah",
    "Adam",
    "Theo",
    "Omar",
    "Hugo",
)
ANIMAL_GIRLS = ("Coco", "Bella", "Daisy", "Hazel", "Pepper", "Willow", "Ruby", "Honey")
ANIMAL_BOYS = ("Pip", "Rusty", "Milo", "Bruno", "Oscar", "Toby", "Jasper", "Otto")
SPECIES = (
    "fox",
    "rabbit",
    "bear",
    "mouse",
    "cat",
    "dog",
    "squirrel",
    "hedgehog",
    "pig",
    "badger",
    "lion",
    "elephant",
    "monkey",
    "panda",
    "penguin",
    "dragon",
)

COLORS = ("red", "blue", "yellow", "green", "orange", "purple", "white", "golden", "pink", "brown")

TOYS = (
    "kite",
    "ball",
    "drum",
    "toy boat",
    "toy train",
    "teddy bear",
    "puppet",
    "wagon",
    "hoop",
    "spinning top",
)
CARRIED = (
    "basket",
    "lantern",
    "bucket",
    "umbrella",
    "blanket",
    "book",
    "bell",
    "whistle",
    "flute",
    "cup",
    "box",
)
WORN = ("hat", "scarf", "cap", "coat", "ribbon")
# What a gust of wind can carry away.
LIGHT = ("kite", "hat", "scarf", "cap", "balloon", "ribbon", "umbrella")
ALL_OBJECTS = tuple(dict.fromkeys(TOYS + CARRIED + WORN + LIGHT))

TRAITS: dict[str, tuple[str, ...]] = {
    "brave": ("{He} was not even afraid of thunder.", "{He} liked to climb high and run fast."),
    "kind": ("{He} had a smile for everyone.", "{He} always said hello to the birds."),
    "curious": ("{He} asked a hundred questions every day.", "{He} wanted to know how everything worked."),
    "cheerful": ("{He} sang from morning until night.", "{He} laughed more than anyone else."),
    "clever": ("{He} was always full of good ideas.", "{He} could solve any puzzle."),
    "gentle": ("{He} never said a mean word.", "{He} was soft and careful with everyone."),
    "playful": ("{He} could turn anything into a game.", "{He} loved to jump and dance."),
    "quiet": ("{He} liked to listen more than to talk.", "{He} spoke softly and thought a lot."),
    "silly": ("{He} made everyone laugh with funny faces.", "{He} often put both socks on one foot."),
    "helpful": ("{He} was always ready to lend a hand.", "{He} helped at home every day."),
}


@dataclass(frozen=True)
class Place:
    """Where a story happens, and what can be found there."""

    noun: str
    preposition: str
    spots: tuple[str, ...]
    helpers: tuple[str, ...]
    water: bool = False
    trees: bool = False
    soil: bool = False


PLACES = (
    Place(
        "forest",
        "in",
        ("behind a tall tree", "under a green bush", "inside a hollow log", "next to the old oak"),
        ("wise old owl", "friendly deer", "busy beaver", "red woodpecker"),
        trees=True,
        soil=True,
    ),
    Place(
        "meadow",
        "in",
        ("in the tall grass", "behind a flat rock", "under the yellow flowers", "next to the fence"),
        ("gentle cow", "old horse", "busy bee", "friendly goat"),
        soil=True,
    ),
    Place(
        "park",
        "in",
        ("under the bench", "behind the swings", "next to the fountain", "near the slide"),
        ("plump pigeon", "friendly duck", "little sparrow", "kind gardener"),
        trees=True,
        soil=True,
    ),
    Place(
        "garden",
        "in",
        ("under the rose bush", "behind the shed", "next to the pumpkins", "near the gate"),
        ("slow snail", "busy bee", "little robin", "green frog"),
        trees=True,
        soil=True,
    ),
    Place(
        "beach",
        "on",
        ("behind a big rock", "under a pile of seaweed", "next to an old boat", "near the soft sand"),
        ("white seagull", "friendly crab", "old turtle", "playful seal"),
        water=True,
    ),
    Place(
        "hill",
        "on",
        ("behind a gray stone", "under the apple tree", "in the tall grass", "next to the old wall"),
        ("friendly goat", "old sheep", "brown hawk", "gentle pony"),
        trees=True,
        soil=True,
    ),
    Place(
        "farm",
        "on",
        ("behind the barn", "under the hay", "next to the well", "near the chicken house"),
        ("old horse", "proud rooster", "gentle cow", "white goose"),
        trees=True,
        soil=True,
    ),
    Place(
        "river",
        "by",
        ("behind the reeds", "under the wooden bridge", "next to a smooth stone", "near the willow tree"),
        ("busy beaver", "green frog", "white goose", "friendly duck"),
        water=True,
        trees=True,
    ),
    Place(
        "lake",
        "by",
        ("behind the boat house", "under the dock", "in the tall reeds", "next to a round stone"),
        ("white swan", "green frog", "old turtle", "friendly duck"),
        water=True,
        trees=True,
    ),
    Place(
        "orchard",
        "in",
        ("behind the apple tree", "under the pear tree", "next to the ladder", "near the stone wall"),
        ("little robin", "busy bee", "friendly goat", "old donkey"),
        trees=True,
        soil=True,
    ),
    Place(
        "village",
        "in",
        ("behind the bakery", "under the market table", "next to the well", "near the school"),
        ("old donkey", "plump pigeon", "kind baker", "friendly goat"),
        trees=True,
    ),
    Place(
        "castle",
        "in",
        ("behind the big door", "under the long table", "next to the tower", "near the stone stairs"),
        ("kind cook", "plump pigeon", "old knight", "gentle pony"),
    ),
)

OUTDOORS = tuple(p for p in PLACES if p.noun != "castle")
WATERSIDE = tuple(p for p in PLACES if p.water)
WOODED = tuple(p for p in PLACES if p.trees)
SOIL = tuple(p for p in PLACES if p.soil)
