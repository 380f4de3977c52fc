"""Story state: who, what and where, and how a sentence template becomes a sentence.

A template is an ordinary ``str.format`` string.  Lower-case fields give the plain form and the same
field with a capital gives the form that starts a sentence: ``{he}`` -> "she", ``{He}`` -> "She".
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import story_words as words


@dataclass(frozen=True)
class Character:
    """A named character; ``kind`` is "girl", "boy", "princess", "prince" or a species."""

    name: str
    kind: str
    female: bool

    @property
    def human(self) -> bool:
        return self.kind not in words.SPECIES


@dataclass(frozen=True)
class Plot:
    """One way a story can go, and what it needs to make sense."""

    theme: str
    tell: Callable[[Story], None]
    objects: tuple[str, ...]
    places: tuple[words.Place, ...]
    morals: tuple[str, ...]
    owns: bool
    avoid: tuple[str, ...]


PLOTS: list[Plot] = []


def plot(
    theme: str,
    *,
    morals: tuple[str, ...],
    objects: tuple[str, ...] = words.ALL_OBJECTS,
    places: tuple[words.Place, ...] = words.PLACES,
    owns: bool = False,
    avoid: tuple[str, ...] = (),
) -> Callable[[Callable[[Story], None]], Callable[[Story], None]]:
    """Register a plot.

    ``owns`` says that the hero has the object from the first sentence on; otherwise the plot itself
    brings it in.  ``avoid`` names traits that would contradict the plot (a brave fox afraid of the dark).
    """

    def register(tell: Callable[[Story], None]) -> Callable[[Story], None]:
        PLOTS.append(Plot(theme, tell, objects, places, morals, owns, avoid))
        return tell

    return register


def article(phrase: str) -> str:
    """ "fox" -> "a fox", "orange kite" -> "an orange kite"."""
    return f"an {phrase}" if phrase[0] in "aeiou" else f"a {phrase}"


def capitalise(text: str) -> str:
    """Upper-case the first letter of the text and of every sentence that follows a full stop."""
    text = re.sub(r'^("?)([a-z])', lambda m: m[1] + m[2].upper(), text)
    return re.sub(r"([.!?] )([a-z])", lambda m: m[1] + m[2].upper(), text)


class Fields(dict[str, str]):
    """Template fields; a capitalised key gives the capitalised value."""

    def __missing__(self, key: str) -> str:
        value = self[key[0].lower() + key[1:]] if key[0].isupper() else None
        if value is None:
            raise KeyError(key)
        return value[0].upper() + value[1:]


class Story:
    """The state of one story while it is being told."""

    def __init__(
        self,
        rng: random.Random,
        plot: Plot,
        hero: Character,
        friend: Character,
        item: str,
        place: words.Place,
    ) -> None:
        self.rng = rng
        self.plot = plot
        self.hero = hero
        self.friend = friend
        self.item = item
        self.place = place
        self.color = rng.choice(words.COLORS)
        self.trait = rng.choice([t for t in words.TRAITS if t not in plot.avoid])
        self.size = rng.choice(("little", "young", "small"))
        self.friend_known = False
        self.paragraphs: list[list[str]] = [[]]
        self.fields = self._make_fields()

    def _make_fields(self) -> Fields:
        rng, hero, friend, place = self.rng, self.hero, self.friend, self.place
        he, him, his = ("she", "her", "her") if hero.female else ("he", "him", "his")
        fhe, fhim, fhis = ("she", "her", "her") if friend.female else ("he", "him", "his")
        adult = rng.choice(("mother", "mother", "father", "grandmother", "grandfather"))
        ahe = "he" if "father" in adult else "she"
        # A helper is never of the hero's own species: "the fox asked the fox" confuses everyone.
        helper = rng.choice([h for h in place.helpers if h.split()[-1] not in (hero.kind, friend.kind)])
        spots = rng.sample(place.spots, 3)
        obj = f"{self.color} {self.item}"
        return Fields(
            h=hero.name,
            he=he,
            him=him,
            his=his,
            himself=him + "self",
            kind=hero.kind,
            f=friend.name,
            fhe=fhe,
            fhim=fhim,
            fhis=fhis,
            fkind=friend.kind,
            a_friend=f"{article(friend.kind)} named {friend.name}",
            his_friend=f"{his} friend {friend.name}",
            p=f"the {place.noun}",
            place=place.noun,
            in_p=f"{place.preposition} the {place.noun}",
            obj=obj,
            item=self.item,
            aobj=article(obj),
            color=self.color,
            trait=self.trait,
            size=self.size,
            helper="the " + helper.split()[-1],
            a_helper=article(helper),
            adult=f"{his} {adult}",
            ahe=ahe,
            ahis="his" if ahe == "he" else "her",
            to_p=f"to the {place.noun}",
            its="his" if helper.endswith(("gardener", "baker", "cook", "knight")) else "its",
            sk=rng.choice(("he", "she")),
            spot1=spots[0],
            spot2=spots[1],
            spot3=spots[2],
            day=rng.choice(("sunny", "warm", "bright", "cool", "quiet"))
            + " "
            + rng.choice(("morning", "day", "afternoon")),
        )

    def set(self, **fields: str) -> None:
        """Add plot-specific fields."""
        self.fields.update(fields)

    def choose(self, *options: str) -> str:
        return self.rng.choice(options)

    def render(self, template: str) -> str:
        # {hx} is the hero in other words now and then, so that "Finn" and "the fox" stay one person.
        name = self.hero.name if self.rng.random() < 0.8 else f"the {self.size} {self.hero.kind}"
        self.fields["hx"] = name
        return capitalise(self._introduce_friend(template).format_map(self.fields))

    def _introduce_friend(self, template: str) -> str:
        """Turn the first bare mention of the friend into "his friend Rusty", unless a character is speaking."""
        if self.friend_known:
            return template
        if re.search(r"\{(a_friend|A_friend|his_friend)\}|(friend|named) \{f\}", template):
            self.friend_known = True
            return template
        match = re.search(r"\{f\}", template)
        if match is None or template[: match.start()].count('"') % 2:
            return template
        self.friend_known = True
        form = "{His_friend}" if re.search(r'[.!?]" $', template[: match.start()]) else "{his_friend}"
        return template[: match.start()] + form + template[match.end() :]

    def say(self, *variants: str) -> None:
        """Add one of several ways to say the same thing."""
        self.paragraphs[-1].append(self.render(self.rng.choice(variants)))

    def maybe(self, chance: float, *variants: str) -> None:
        """Like ``say``, but only sometimes."""
        if self.rng.random() < chance:
            self.say(*variants)

    def para(self) -> None:
        """Start a new paragraph."""
        if self.paragraphs[-1]:
            self.paragraphs.append([])

    def text(self) -> str:
        return "\n\n".join(" ".join(p) for p in self.paragraphs if p)


def tell_opening(s: Story) -> None:
    """Who the story is about, where, and (if the plot starts so) what the hero owns."""
    tale = s.rng.random()
    who = f"{s.choose('{trait}', '{trait} {size}', '{size}')} {{kind}}"
    a_who = article(s.render(who).lower())
    s.set(a_who=a_who)
    if tale < 0.6:
        s.say(
            "Once upon a time, there was {a_who} named {h}.",
            "Once upon a time, there was {a_who} named {h}.",
            "Once upon a time, there lived {a_who} called {h}.",
            "Once upon a time, {a_who} named {h} lived near {p}.",
            "Once upon a time, in a little house near {p}, there lived {a_who} named {h}.",
        )
    else:
        s.say(
            "There once was {a_who} named {h}.",
            "{h} was {a_who}.",
            "Long ago, in a small house near {p}, lived {a_who} named {h}.",
            "Not far from {p}, there lived {a_who} called {h}.",
            "Do you know the story of {h}? {He} was {a_who} who lived near {p}.",
            "This is the story of {h}, {a_who}.",
        )
    if s.trait in a_who:
        s.maybe(0.5, *words.TRAITS[s.trait])
    if s.plot.owns:
        s.say(
            "{He} had {aobj}, and {he} loved it very much.",
            "{His} favorite thing in the world was {aobj}.",
            "{He} took {his} {obj} everywhere.",
            "For {his} birthday, {h} got {aobj}.",
            "{Adult} had given {him} {aobj}.",
        )
    else:
        s.maybe(
            0.4,
            "{He} loved to play {in_p}.",
            "{He} lived with {adult} and liked long walks.",
            "Every day, {he} went out to see what was new {in_p}.",
        )


def tell_closing(s: Story) -> None:
    """The feeling and, more often than not, the moral."""
    roll = s.rng.random()
    s.set(moral=s.rng.choice(s.plot.morals))
    moral = (
        "{h} learned that {moral}.",
        "And so {h} learned that {moral}.",
        "From that day on, {h} knew that {moral}.",
        "{h} never forgot that {moral}.",
        '"You see," said {adult} that evening, "{moral}."',
    )
    feeling = (
        "That night, {hx} fell asleep with a smile.",
        "{hx} went home with a happy heart.",
        "It was the best day of all.",
        "{hx} felt warm and happy inside.",
        "And {he} smiled all the way home.",
        "{h} was so happy that {he} danced all the way home.",
    )
    if roll < 0.5:
        s.say(*moral)
    elif roll < 0.8:
        s.say(*feeling)
    else:
        s.say(*feeling[:4])
        s.say(*moral[:3])
    s.maybe(0.15, "The end.")
