"""Conversations for the demo model: requests for stories, and a little small talk."""

from __future__ import annotations

import random

from story_state import Story, article

ASK = (
    "Tell me a story about {what}.",
    "Tell me a story about {what}.",
    "Write a story about {what}.",
    "Write a short story about {what}.",
    "Can you tell me a story about {what}?",
    "Please tell me a story about {what}.",
    "Please write a story about {what}.",
    "I would like a story about {what}.",
    "I want to hear a story about {what}.",
    "Do you know a story about {what}?",
    "tell me a story about {what}",
    "A story about {what}, please.",
)
ASK_ANYTHING = (
    "Tell me a story.",
    "Tell me a story!",
    "tell me a story",
    "Can you tell me a story?",
    "Please tell me a story.",
    "Write a short story.",
    "Write a story for children.",
    "Tell me a bedtime story.",
    "Another story, please!",
    "Once more, please.",
    "I want to hear a story.",
    "Do you know a story?",
    "Yes, please!",
    "Yes.",
)
SMALL_TALK = (
    (
        (
            "Hello!",
            "Hello",
            "Hi!",
            "hi",
            "Hi there!",
            "Hey!",
            "Good morning!",
            "Good evening!",
            "Hello, how are you?",
        ),
        (
            "Hello! Would you like to hear a story?",
            "Hello there! I tell little stories. Who should the story be about?",
            "Hi! I am happy to see you. Shall I tell you a story?",
        ),
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Are you a robot?",
            "Tell me about yourself.",
        ),
        (
            "I am a very small language model, and I tell little stories. Shall I tell you one?",
            "I am a tiny story model. Ask me for a story about a brave fox, for example!",
        ),
    ),
    (
        ("What can you do?", "How can you help me?", "Help!", "What do you know?", "Can you help me?"),
        (
            "I can tell you a story. Just say who it should be about, and what they should have with them.",
            "I tell short stories about children and animals. Ask me for one about a girl and a red kite!",
        ),
    ),
    (
        (
            "Thank you!",
            "Thanks!",
            "Thank you very much.",
            "That was nice.",
            "I liked that story.",
            "Great story!",
        ),
        (
            "You are welcome! Would you like another story?",
            "I am glad that you liked it. Shall I tell you one more?",
        ),
    ),
    (
        ("Good night!", "Bye!", "Goodbye!", "See you later!", "I have to go now."),
        ("Goodbye! Come back soon for another story.", "Good night, and sweet dreams!"),
    ),
    (
        (
            "What is the capital of France?",
            "How old is the earth?",
            "What is two plus two?",
            "Write a program.",
            "What time is it?",
            "How do I cook rice?",
            "Who is the president?",
            "What is the weather like today?",
            "Translate this into German.",
            "Why is the sky blue?",
            "Solve this equation.",
            "How does a computer work?",
            "What is the meaning of life?",
            "Give me some advice.",
            "Explain how a car works.",
            "Sing a song.",
        ),
        (
            "I do not know that. I am a tiny model, and I only know little stories. Would you like one?",
            "That is too hard for me, because I am very small. But I can tell you a story!",
        ),
    ),
)


def story_request(rng: random.Random, story: Story) -> str:
    """A request that the given story fulfils."""
    kind, name, item = story.hero.kind, story.hero.name, article(f"{story.color} {story.item}")
    traited = article(f"{story.trait} {kind}")
    mentioned = f"{story.trait} " in story.fields["a_who"]
    hero = traited if mentioned and rng.random() < 0.7 else article(f"little {kind}" if rng.random() < 0.2 else kind)
    place = f"{story.place.preposition} the {story.place.noun}"
    roll = rng.random()
    if roll < 0.15:
        return rng.choice(ASK_ANYTHING)
    if roll < 0.45:
        what = hero
    elif roll < 0.60:
        what = f"{name} and {item}"
    elif roll < 0.68:
        what = f"{hero} and {item}"
    elif roll < 0.74:
        what = f"{hero} {place}"
    elif roll < 0.80:
        what = f"{name} and {story.friend.name}"
    elif roll < 0.85:
        what = item
    elif roll < 0.92:
        what = f"{hero} named {name}"
    else:
        what = story.plot.theme
    return rng.choice(ASK).format(what=what)


def conversation(rng: random.Random, story: Story, text: str) -> tuple[tuple[str, str], ...]:
    """Mostly one request and one story; sometimes with small talk before or after, or nothing else."""
    request = (story_request(rng, story), text)
    roll = rng.random()
    if roll < 0.70:
        return (request,)
    users, answers = rng.choice(SMALL_TALK)
    talk = (rng.choice(users), rng.choice(answers))
    if roll < 0.80:
        return (talk,)
    if roll < 0.92:
        return (talk, request)
    users, answers = SMALL_TALK[3]
    return (request, (rng.choice(users), rng.choice(answers)))
