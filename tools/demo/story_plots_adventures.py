"""Plots about the wide world: weather, animals, the night, and learning something new."""

from __future__ import annotations

import story_words as words
from story_state import Story, article, plot


@plot(
    "getting lost",
    owns=True,
    places=tuple(p for p in words.OUTDOORS if p.noun not in ("garden", "park")),
    morals=(
        "it is wise to stay calm when you are lost",
        "you should stop and look at the way now and then",
        "home is the best place of all",
    ),
)
def lost_way(s: Story) -> None:
    s.para()
    s.say(
        "One {day}, {h} took {his} {item} and went for a walk {in_p}.",
        "One {day}, {h} walked farther than ever before, with {his} {item} under {his} arm.",
    )
    s.say(
        "{He} followed a butterfly, and forgot to look at the way.",
        "{He} looked at the clouds and the flowers, but not at the path.",
    )
    s.say(
        "When {he} stopped, nothing looked right. {hx} was lost!",
        'Then {he} turned around. "Where is my house?" {he} said. {hx} was lost.',
    )
    s.say(
        "It grew dark, and the shadows grew long. {h} sat down {spot1} and held {his} {item} tight.",
        "The sun was going down. {h} hugged the {obj} and tried not to cry.",
    )
    s.say(
        '"Are you lost?" asked {a_helper}.',
        'Then {he} heard a voice. It was {a_helper}. "Did you lose your way?" asked {helper}.',
    )
    s.say(
        '"Yes," said {h}. "I want to go home."',
        '{h} nodded. "I do not know the way," {he} said.',
    )
    s.para()
    s.say(
        '"Do not be afraid," said {helper}. "I know every path here. Follow me."',
        '"Dry your eyes," said {helper}. "We will find the way together."',
    )
    s.say(
        "They walked and walked, and then they saw a light. It was {his} house!",
        "They walked side by side under the stars. Soon {h} saw a light in a window.",
    )
    s.say(
        '{Adult} ran out and hugged {him}. "I saw your {obj} from far away!" {ahe} cried.',
        '"There you are!" cried {adult}, and {ahe} held {h} for a long, long time.',
    )
    s.say(
        "{Helper} got a warm cup of milk and a place by the fire.",
        '"Thank you," {h} said to {helper}. "You can come and visit us any time."',
    )


@plot(
    "a little bird",
    objects=("basket", "box", "scarf", "blanket", "hat", "cap", "cup"),
    places=words.WOODED,
    owns=True,
    morals=(
        "even the smallest ones need our care",
        "to love something, you must let it fly",
        "kindness has wings",
    ),
)
def bird(s: Story) -> None:
    s.para()
    s.say(
        "One {day}, {h} found a tiny bird {spot1}. Its wing was hurt.",
        "One {day}, {h} heard a soft peep. A little bird lay {spot1}. It could not fly.",
    )
    s.say('"You poor little thing," {he} said.', '"Do not be afraid," whispered {h}. "I will help you."')
    s.say(
        "{He} took {his} {obj} and made a soft bed in it with grass and leaves.",
        "{He} put the bird into {his} {obj}, very gently, and carried it home.",
    )
    s.say(
        "{Adult} put a small bandage on the wing.",
        '"It needs rest, water, and seeds," said {adult}.',
    )
    s.say(
        "Every day, {h} gave the bird water and seeds and sang to it.",
        "{h} took care of the bird day and night. {f} came to help with the seeds.",
    )
    s.para()
    s.say(
        "After two weeks, the bird flapped its wings. It could fly again!",
        "One morning, the bird hopped out of the {item} and flew around the room.",
    )
    s.say(
        "{h} was happy and sad at the same time. {He} opened the window.",
        '"You have to go home now," said {h}, and {he} opened the window wide.',
    )
    s.say(
        "The bird sang one more song and flew away {to_p}.",
        '"Goodbye, little bird," said {h}, and off it flew into the blue sky.',
    )
    s.say(
        "The next spring, it came back and built a nest in the old {obj}.",
        "Every morning since then, a little bird sings at the window.",
    )


@plot(
    "a scary noise",
    avoid=("brave",),
    owns=True,
    morals=(
        "things are often less scary when you look at them",
        "being brave means taking one more step",
        "a big noise can come from a small throat",
    ),
)
def noise(s: Story) -> None:
    maker, sound = s.rng.choice((("frog", "Croak"), ("kitten", "Meow"), ("cricket", "Chirp"), ("puppy", "Woof")))
    s.set(maker=maker, sound=sound)
    s.para()
    s.say(
        "One evening, {h} heard a strange noise. {sound}! {sound}! It came from {p}.",
        "One dark night, a strange sound woke {h}. {sound}! {sound}!",
    )
    s.say(
        '"Is it a monster?" {he} whispered, and {he} hid behind {his} {item}.',
        '{He} hugged {his} {obj}. "Maybe it is a giant," {he} said.',
    )
    s.say(
        '{He} ran to {f}. "There is something out there!" {he} said.',
        '{f} heard it too. "What can it be?" {fhe} asked, and {fhis} voice shook.',
    )
    s.say(
        '"Let us go and look," said {f}. "Together we are not so small."',
        '"We could hide under the bed," said {f}. "Or we could go and see."',
    )
    s.say(
        "Step by step, they walked {to_p}. {sound}! The noise was louder now.",
        "So they tiptoed {to_p}, hand in hand. {sound}! It was very near now.",
    )
    s.para()
    s.say(
        "{hx} took a deep breath and looked {spot1}. And what did {he} see? A tiny {maker}!",
        "{h} held up the {obj} and looked {spot1}. There sat a very small {maker}!",
    )
    s.say(
        '"Hello," said the {maker}. "I was singing, because I was all alone."',
        '"Did I scare you?" asked the {maker}. "I only wanted to find a friend."',
    )
    s.say(
        "{h} and {f} laughed and laughed. The monster was no bigger than a shoe!",
        '"You have a very big voice," said {h}, and they all began to laugh.',
    )
    s.say(
        "From then on, the three of them sang together every evening.",
        "They gave the {maker} a cookie, and it slept in the {obj} that night."
        if s.item in ("basket", "box", "hat", "bucket", "cap", "wagon")
        else "They gave the {maker} a cookie and became friends.",
    )


@plot(
    "a tiny seed",
    places=words.SOIL,
    objects=("bucket", "cup", "hat"),
    owns=True,
    morals=(
        "good things take time",
        "patience makes the garden grow",
        "big things start very small",
    ),
)
def seed(s: Story) -> None:
    plant, fruit = s.rng.choice((("sunflower", "seeds"), ("apple tree", "apples"), ("pumpkin", "pie")))
    s.set(a_plant=article(plant), fruit=fruit)
    s.para()
    s.say(
        'One spring day, {a_helper} gave {h} a tiny seed. "Plant it and wait," said {helper}.',
        "One spring day, {h} found a tiny seed at the bottom of {his} {item}.",
    )
    s.say(
        "{h} made a hole {spot1}, put the seed in, and covered it with soil.",
        "{He} planted it {in_p}, {spot1}.",
    )
    s.say(
        "Every morning, {he} brought water in {his} {obj}.",
        "{He} filled {his} {obj} with water and watered it every day.",
    )
    s.say(
        "But nothing happened. One week went by, and then another.",
        "Day after day, {he} looked at the ground. There was only dirt.",
    )
    s.say(
        '"Maybe it is asleep," laughed {f}. "Come and play!"',
        '"It will never grow," said {f}. But {h} did not give up.',
    )
    s.say(
        '"Good things need time," said {adult}. "Wait a little longer."',
        "{hx} sang to the seed and told it stories.",
    )
    s.para()
    s.say(
        "Then, one morning, there was a small green leaf!",
        'One day, after the rain, a little green tip came out of the ground. "Look!" cried {h}.',
    )
    s.say(
        "It grew and grew. By the end of summer, it was {a_plant}, bigger than {h}!",
        "The leaf became a stem, and the stem became {a_plant}.",
    )
    s.say(
        "{h} shared the {fruit} with {f} and with everybody {in_p}.",
        "In autumn, {h} filled the {obj} with {fruit} and gave some to all {his} friends.",
    )


@plot(
    "baking",
    objects=("basket", "cup", "box", "bucket"),
    places=tuple(p for p in words.OUTDOORS if p.noun != "beach"),
    morals=(
        "a cake tastes best when you share it",
        "good neighbors are a treasure",
        "everyone has something to give",
    ),
    owns=True,
)
def baking(s: Story) -> None:
    cake = s.choose("apple cake", "carrot cake", "honey cake", "berry pie")
    missing = s.choose("milk", "flour", "sugar", "butter")
    s.set(cake=cake, a_cake=article(cake), missing=missing)
    s.para()
    s.say(
        '"Today I will bake {a_cake}!" said {h} one {day}.',
        "One {day}, {h} wanted to bake {a_cake} for {adult}.",
    )
    s.say(
        "{He} put on an apron and looked for everything {he} needed. But there was no {missing}!",
        "{He} took out a bowl and a spoon. Then {he} saw that there was no {missing} left.",
    )
    s.say(
        "So {he} took {his} {obj} and went to {f}.",
        "So {hx} took the {obj} and knocked on {f}'s door.",
    )
    s.say(
        '"Do you have some {missing}?" {he} asked. "Yes," said {f}. "Can I help you bake?"',
        '"Could I have a little {missing}?" asked {h}. "Of course," said {f}, and {fhe} filled the {item}.',
    )
    s.say(
        "They mixed and stirred. There was flour on their noses and on the floor."
        if missing != "flour"
        else "They mixed and stirred until their arms were tired.",
        "{h} mixed, and {f} stirred. They sang the whole time.",
    )
    s.para()
    s.say(
        "Soon a sweet smell filled the air and drifted all the way {to_p}.",
        "The {cake} went into the oven, and it smelled so good!",
    )
    s.say(
        'Knock, knock! It was {a_helper}. "What smells so nice?" asked {helper}.',
        '{A_helper} looked in at the window. "Is there a little piece for me?" asked {helper}.',
    )
    s.say('"Come in!" said {h}. "There is enough for everyone."', '"Sit down with us," said {h}.')
    s.say(
        "They ate the {cake} together, down to the last crumb.",
        "Everyone had a big slice, and {adult} had two.",
    )


@plot(
    "the moon",
    places=words.WATERSIDE,
    objects=("bucket", "basket", "cup", "hat", "box", "lantern"),
    owns=True,
    morals=(
        "some things belong to everyone",
        "you can love a thing without keeping it",
        "the moon shines for all of us",
    ),
)
def moon(s: Story) -> None:
    s.para()
    s.say(
        "One night, {h} saw the moon shining in the water near {p}.",
        "One clear night, {h} sat {in_p}. The round moon was floating on the water.",
    )
    s.say(
        '"The moon fell down!" {he} cried. "I will take it home."',
        '"If I catch it, I will never be in the dark again," thought {h}.',
    )
    s.say(
        "{He} took {his} {obj} and dipped it into the water. But the moon broke into a hundred pieces.",
        "{He} reached out with {his} {item}. Splash! The moon wiggled and slipped away.",
    )
    s.say(
        "{hx} waited until the water was still. There was the moon again! {He} tried again and again.",
        "Again and again, {he} tried to catch it. {His} feet were wet, and the {item} was empty.",
    )
    s.say(
        '"What are you doing?" asked {a_helper}. "I am catching the moon," said {h}.',
        '{A_helper} watched {him} for a while. "What are you trying to catch?" asked {helper}. "The moon," said {h}.',
    )
    s.para()
    s.say(
        '{Helper} smiled. "Look up," {helper} said. And there was the moon, high in the sky.',
        '"Now look over your head," said {helper}. {h} looked up and laughed.',
    )
    s.say(
        '"The moon is too big for a {item}," said {helper}. "But you can see it wherever you go."',
        '"Nobody can own the moon," said {helper}. "That is why it shines for everyone."',
    )
    s.say(
        "{h} lay down in the grass, and they looked at the moon together.",
        "{h} walked home with an empty {item}, and the moon walked with {him} all the way.",
    )


@plot(
    "trying again",
    places=tuple(p for p in words.PLACES if p.noun in ("beach", "park", "garden", "hill", "meadow", "farm")),
    objects=("ribbon", "scarf", "hat", "cap", "balloon", "bell"),
    owns=True,
    morals=(
        "you can always start again",
        "a fall is not the end",
        "what you build with a friend is stronger",
    ),
)
def rebuild(s: Story) -> None:
    if s.place.noun == "beach":
        s.set(thing="sand castle", breaks="a big wave came and washed it away", stuff="sand and shells")
    else:
        s.set(thing="little house", breaks="a strong wind came and blew it down", stuff="sticks and stones")
    s.para()
    s.say(
        "One {day}, {h} wanted to build a {thing} {in_p}.",
        '"I will build the best {thing} in the world," said {h} one {day}.',
    )
    s.say(
        "{He} worked for hours with {stuff}. On top, {he} put {his} {obj}.",
        "{He} used {stuff}, and {he} put the {obj} on the roof like a flag.",
    )
    s.say("It was beautiful. But then {breaks}.", "Then, just when it was ready, {breaks}.")
    s.say(
        "Only the {item} was left. {hx} sat down and cried.",
        '"All my work is gone!" cried {h}. Only the {obj} was left, and {he} held it tight.',
    )
    s.say(
        '{f} came by. "What happened?" {fhe} asked. {h} told {fhim} everything.',
        '"Do not cry," said {f}. "I can help you build it again."',
    )
    s.say(
        '"This time we will build it farther back," said {h}.'
        if s.place.noun == "beach"
        else '"This time we will build it {spot1}, out of the wind," said {h}.',
        '"This time we will make the walls thicker," said {f}.',
    )
    s.para()
    s.say(
        "They worked together until their hands were sore.",
        "{h} brought the {stuff}, and {f} built the walls.",
    )
    s.say(
        "The new {thing} was twice as big as the old one. It was strong, too.",
        "When it was done, it had two towers and a door.",
    )
    s.say(
        'They put the {obj} on top and shouted, "Hooray!"',
        "At the very top was the {obj}. And this time, the {thing} did not fall.",
    )


@plot(
    "learning something new",
    objects=("kite", "flute", "drum", "hoop", "spinning top", "whistle"),
    places=words.OUTDOORS,
    morals=(
        "practice makes hard things easy",
        "you only fail if you stop trying",
        "every expert was once a beginner",
    ),
)
def learning(s: Story) -> None:
    verb, fail = {
        "kite": ("fly", "The {item} fell on the ground like a wet leaf."),
        "flute": ("play", "The {item} squeaked like a door."),
        "drum": ("play", "The {item} sounded like falling pots."),
        "hoop": ("roll", "The {item} rolled in a circle and fell over."),
        "spinning top": ("spin", "The {item} wobbled and fell over."),
        "whistle": ("blow", "No sound came out of the {item}."),
    }[s.item]
    s.set(verb=verb)
    s.para()
    s.say(
        "One {day}, {adult} gave {h} {aobj}. But {h} did not know how to {verb} it.",
        "One {day}, {h} got {aobj}. {He} wanted to learn how to {verb} it.",
    )
    s.say("{He} went {to_p} and tried. " + fail, "{He} tried it {in_p}. " + fail)
    s.say('"This is too hard," said {h}.', '"I will never learn it," {he} said with a sigh.')
    s.say(
        '"Try again," said {a_helper}. "I fell many times before I could do what I do now."',
        '{A_helper} heard {him}. "Nobody can do it the first time," said {helper}. "Try once more."',
    )
    s.say(
        "{h} tried again, and again, and again. It was a little better each time.",
        "So {hx} tried ten times that day, and ten times the next day.",
    )
    s.say(
        '{f} came to watch. "You are getting better!" {fhe} said.',
        "On the third day, {f} came along and cheered for {him}.",
    )
    s.para()
    s.say(
        "And then, all of a sudden, it worked! {h} could {verb} the {obj}!",
        'At last, it worked. "Look! I can {verb} it!" cried {h}.',
    )
    s.say(
        "{f} clapped, and {helper} danced.",
        '"I knew you could do it," said {helper}.',
    )
    s.say(
        '"Will you teach me?" asked {f}. "Yes," said {h}. "It takes time, but I will help you."',
        "Then {h} showed {f} how to {verb} it, too.",
    )


@plot(
    "too many berries",
    objects=("basket", "bucket", "box", "cup", "hat"),
    places=tuple(p for p in words.WOODED if p.noun not in ("village", "lake")),
    owns=True,
    morals=(
        "enough is better than too much",
        "sweet things are sweeter when you share them",
        "it is wise to stop in time",
    ),
)
def berries(s: Story) -> None:
    fruit = s.choose("berries", "cherries", "plums")
    s.set(fruit=fruit)
    s.para()
    s.say(
        "One {day}, {h} went {to_p} with {his} {item} to pick {fruit}.",
        "One {day}, {h} found a bush full of {fruit} {spot1}."
        if fruit == "berries"
        else "One {day}, {h} found a tree full of {fruit} {in_p}.",
    )
    s.say("Soon the {obj} was full to the top.", "{He} picked and picked until the {obj} was full.")
    s.say(
        '"May I have some?" asked {f}. "No," said {h}. "They are all for me."',
        '{f} came by and said, "They look so good! Can I have one?" But {h} said no.',
    )
    s.say(
        "{hx} ate one, and then ten, and then all of them.",
        "{h} sat down {spot2} and ate and ate until the {item} was empty.",
    )
    s.say(
        '"Ouch, my tummy!" {he} groaned. {He} could not even stand up.',
        "Then {his} tummy began to hurt. It was as round as a ball.",
    )
    s.para()
    s.say(
        '{f} heard {him}. {Fhe} could have laughed, but {fhe} did not. "I will make you some tea," {fhe} said.',
        "{f} came running with a warm blanket and some tea.",
    )
    s.say(
        '"You are so kind, and I was so greedy," said {h}. "I am sorry."',
        '"I should have shared with you," {h} said softly.',
    )
    s.say(
        "The next day, they went {to_p} again. This time, they filled the {item} together.",
        "When {h} felt better, they picked more {fruit} together.",
    )
    s.say(
        "They shared everything: one for {h}, one for {f}.",
        '"Half for you, and half for me," said {h}, and it tasted much better.',
    )


@plot(
    "a treasure map",
    places=words.OUTDOORS,
    morals=(
        "the way can be as nice as the treasure",
        "the best treasure is a friend",
        "adventures are better with a friend",
    ),
)
def treasure(s: Story) -> None:
    s.para()
    s.say(
        "One {day}, {h} found an old map in an old book. There was a big X on it.",
        "One {day}, the wind blew a piece of paper to {h}. It was a treasure map!",
    )
    s.say(
        '"Come with me!" {he} called to {f}. "We will find a treasure!"',
        '{He} showed it to {his_friend}. "A real treasure!" said {f}.',
    )
    s.say(
        'The map said, "Start {spot1}." So they went {to_p} and started there.',
        "First the map led them {to_p}. They looked {spot1} and found an arrow made of stones.",
    )
    s.say(
        "Then they had to take twenty big steps. {hx} counted out loud.",
        "From there, they had to hop on one leg. That made them laugh.",
    )
    s.say(
        '"It must be {spot2}," said {f}. They looked, but there was nothing.',
        "They looked {spot2}. There was only an old shoe.",
    )
    s.para()
    s.say(
        '{h} turned the map around. "We had it upside down!" {he} said. "It is {spot3}!"',
        'Then {h} had an idea. "Let us look {spot3}!" {he} said.',
    )
    s.say(
        "And there was a little chest. They opened it slowly. Inside was {aobj}!",
        "They dug and dug. Bump! There was a chest, and in it lay {aobj}.",
    )
    s.say(
        '"A treasure!" cried {h}. "And we found it all by ourselves!"',
        '"It is not gold," said {f}, "but it is much better!"',
    )
    s.say(
        "They took turns with the {item} all the way home.",
        "{h} and {f} kept the {obj} as their secret treasure.",
    )


@plot(
    "the dark",
    avoid=("brave",),
    objects=("lantern", "teddy bear", "blanket", "book", "bell"),
    owns=True,
    morals=(
        "the dark is only the day with its eyes closed",
        "you are never really alone",
        "a little light goes a long way",
    ),
)
def dark(s: Story) -> None:
    s.para()
    s.say(
        "{h} was afraid of only one thing. It was the dark.",
        "Every night, {h} was afraid, because {his} room was so dark.",
    )
    s.say(
        "One night, {he} saw a big shadow on the wall. It had long arms!",
        "One night, {he} heard something scratch at the window. Scratch, scratch!",
    )
    s.say(
        "{hx} pulled {his} {obj} close and hid under the covers.",
        '{He} held {his} {item} and called out, "Who is there?"',
    )
    s.say(
        '{Adult} came in and sat on the bed. "What is it, dear?" {ahe} asked.',
        '"What is wrong?" asked {adult}, who had heard {him}.',
    )
    s.say('"There is something in the dark," whispered {h}.', '"I am afraid of the dark," said {h}.')
    s.say(
        '"Then let us look at it together," said {adult}, and {ahe} opened the window.',
        '"Come," said {adult}. "Take your {item}, and let us go and see."',
    )
    s.para()
    s.say(
        "It was only a branch, waving in the wind. {h} waved back.",
        "Outside stood the old tree. Its branches were dancing in the wind, and that was all.",
    )
    s.say(
        "High above {p}, a thousand stars were shining.",
        '"Without the dark, we could never see the stars," said {adult}.',
    )
    s.say(
        "{h} yawned. {He} put the {obj} next to the pillow and closed {his} eyes.",
        "{hx} looked at the stars for a long time. Then {he} fell asleep with the {item} in {his} arms.",
    )


@plot(
    "a rainy day",
    objects=("umbrella", "blanket", "coat"),
    places=words.OUTDOORS,
    owns=True,
    morals=(
        "there is always room for one more",
        "a small roof is big enough for many friends",
        "rain is fun when you share it",
    ),
)
def rain(s: Story) -> None:
    s.para()
    s.say(
        "One day, {h} was {in_p} when the rain began. {He} opened the {obj} and stayed dry."
        if s.item == "umbrella"
        else "One day, {h} was {in_p} when the rain began. {He} pulled the {obj} over {his} head and stayed dry.",
        "Drip, drop! One day, {h} was out {in_p}, and it began to rain. But {he} had {his} {item}.",
    )
    first, second, third = s.rng.sample(["mouse", "snail", "frog", "chick", "kitten", "duckling", "lamb"], 3)
    s.set(a=first, b=second, c=third)
    s.say(
        'A wet {a} came along. "May I come under your {item}?" asked the {a}.',
        '"I am so wet," said a little {a}. "Can I come under your {item}?"',
    )
    s.say('"Yes, come in," said {h}.', '"Of course," said {h}, and {he} moved over.')
    s.say(
        'Then a {b} came. "Is there room for me?" asked the {b}. "Yes," said {h}.',
        'Soon a {b} came running. "Me too, please!" said the {b}. So they moved closer.',
    )
    s.say(
        'Then came a {c}. "There is no more room!" said the {a}.',
        'At last a very small {c} came by. "We are full," said the {b}.',
    )
    s.para()
    s.say(
        '"We can make room," said {h}. "Hold your breath and squeeze!"',
        '"If we hug each other, there is room," said {hx}.',
    )
    s.say(
        "So they all stood close together: the {a}, the {b}, the {c}, and {h}.",
        "They squeezed and hugged and giggled, and all of them fit.",
    )
    s.say(
        "It was warm and cozy under the {obj}, and they sang until the rain stopped.",
        "{h} told them a story, and nobody thought about the rain.",
    )
    s.say(
        "Then the sun came out, and there was a rainbow over {p}.",
        "When the rain was over, they all jumped in the puddles together.",
    )


@plot(
    "a snowman",
    objects=("hat", "scarf", "cap", "coat"),
    places=tuple(p for p in words.OUTDOORS if p.noun not in ("beach", "river")),
    owns=True,
    morals=(
        "a warm heart is warmer than any coat",
        "giving keeps you warm",
        "a good deed is never lost",
    ),
)
def snowman(s: Story) -> None:
    s.set(day="cold morning")
    s.para()
    s.say(
        "One cold morning, everything {in_p} was white with snow.",
        "One winter day, snow fell on {p} until everything was white.",
    )
    s.say(
        "{h} and {f} rolled three big balls and made a snowman.",
        '"Let us make a snowman!" said {h}. {f} came to help.',
    )
    s.say(
        "They gave the snowman two stones for eyes and a carrot for a nose.",
        "The snowman got a carrot nose and a smile made of little stones.",
    )
    s.say(
        '"He looks cold," said {h}. {He} took off {his} {obj} and put it on the snowman.',
        '"Something is missing," said {f}. So {h} gave the snowman {his} own {item}.',
    )
    s.say(
        '"Will you not be cold?" asked {f}. "I will run home fast," said {h}.',
        "Now the snowman looked very fine, and {h} ran home with a red nose.",
    )
    s.para()
    s.say(
        "That night, there was a soft knock at the window.",
        "In the night, {hx} woke up and looked out of the window.",
    )
    s.say(
        '"Thank you," said the snowman. "Nobody has ever given me anything."',
        'The snowman was dancing in the moonlight! He waved and said, "Thank you, {h}."',
    )
    s.say(
        "Was it a dream? In the morning, the {obj} lay at the door, warm and dry.",
        "When the snow melted in spring, {h} found the {item} again, and a flower was growing next to it.",
    )


@plot(
    "a rescue",
    places=words.WATERSIDE,
    objects=("umbrella", "scarf", "hoop", "basket", "blanket", "bucket", "coat"),
    owns=True,
    morals=(
        "being calm is the best help",
        "you do not have to be big to be a hero",
        "brave and careful go well together",
    ),
)
def rescue(s: Story) -> None:
    baby = s.rng.choice([b for b in ("kitten", "duckling", "puppy", "mouse", "lamb") if b != s.hero.kind])
    s.set(baby=baby)
    s.para()
    s.say(
        'One {day}, {h} and {f} were playing {in_p}. "Help! Help!" cried a tiny voice.',
        "One {day}, {h} heard a cry for help {in_p}. {f} heard it too.",
    )
    s.say(
        "A little {baby} was sitting on a log, and the log was floating away!",
        "A little {baby} had fallen into the water and was holding on to a branch.",
    )
    s.say('"What can we do?" asked {f}. "The water is too deep!"', '"We must be quick!" said {f}.')
    s.say(
        "{hx} looked around and thought hard. Then {he} looked at {his} {obj}.",
        'Then {h} had an idea. "My {item}!" {he} said.',
    )
    s.say(
        "{f} held on to {h}, and {h} held the {item} out over the water.",
        "{h} lay down flat and reached out with the {obj}, while {f} held {his} feet.",
    )
    s.say('"Take hold of it!" {he} called.', '"Hold on tight!" called {h}.')
    s.para()
    s.say(
        "The {baby} took hold of the {item}, and they pulled. One, two, three!",
        "It was almost too far. But then the {baby} got hold of it, and they pulled it in.",
    )
    s.say(
        "At last the {baby} was safe. It was wet and cold, but it was smiling.",
        "Soon the little {baby} was back on land, and {h} dried it in the sun.",
    )
    s.say(
        'Its mother came running. "You saved my baby!" she cried. "How can I thank you?"',
        '"You are my heroes," said the {baby}.',
    )
    s.say(
        "That evening, everybody talked about {h} and the {obj}.",
        "The {item} was wet, but {h} did not mind at all.",
    )
