"""Plots about things: lost, found, broken, borrowed, made and carried off by the wind."""

from __future__ import annotations

import story_words as words
from story_state import Story, plot


@plot(
    "something lost",
    owns=True,
    morals=(
        "it is good to ask for help",
        "two pairs of eyes see more than one",
        "a good helper can be found anywhere",
    ),
)
def lost(s: Story) -> None:
    s.para()
    s.say(
        "One {day}, {h} could not find {his} {item}.",
        "One {day}, {h} woke up and saw that the {item} was gone.",
        "One {day}, {h} came home from {p} and stopped. The {obj} was missing!",
    )
    s.say(
        '"Oh no! Where is my {item}?" {he} cried.',
        '"Where can it be?" {he} said, and {his} eyes filled with tears.',
        '{His} heart sank. "I must find it," {he} said.',
    )
    s.say(
        "{hx} looked {spot1}. It was not there. {He} looked {spot2}. It was not there either.",
        "{He} ran back and looked {spot1} and {spot2}, but {he} found nothing.",
        "First {he} searched {spot1}. Then {he} searched {spot2}. No {item}!",
    )
    s.say(
        'Just then, {a_helper} came by. "Why are you so sad?" asked {helper}.',
        '{A_helper} saw {him} searching. "What did you lose?" asked {helper}.',
        'Then {h} met {a_helper}. "Can you help me?" {he} asked.',
    )
    s.say('"I lost my {obj}," said {h}.', '"My {obj} is gone," said {h} with a sniff.')
    s.say(
        '"I saw something {color} {spot3}," said {helper}. "Come with me!"',
        '"Let us look together," said {helper}. "Did you look {spot3}?"',
        '"Do not worry," said {helper}. "Four eyes see more than two."',
    )
    s.para()
    s.say(
        "They went to look, and there, {spot3}, was the {obj}!",
        "They searched side by side. And there it was! The {obj} was lying {spot3}.",
        "Soon they saw something {color} {spot3}. It was the {item}!",
    )
    s.say(
        '"Thank you!" cried {h}, and {he} gave {helper} a big hug.',
        '{h} hugged the {item} tight. "Thank you so much!" {he} said to {helper}.',
        '"You are a true friend," {h} told {helper}.',
    )


@plot(
    "something stuck in a tree",
    owns=True,
    objects=words.LIGHT,
    places=words.WOODED,
    morals=(
        "a hard problem is easier with a friend",
        "being small can be a good thing",
        "there is always a way if you stay calm",
    ),
)
def stuck(s: Story) -> None:
    s.para()
    s.say(
        "One windy day, {h} took {his} {item} to {p}.",
        "One windy morning, {h} went out with {his} {obj}.",
        "One day, {h} and {his} friend {f} were playing {in_p} with the {item}.",
    )
    s.say(
        "Whoosh! A gust of wind lifted the {item} and dropped it at the top of a tall tree.",
        "Suddenly the wind blew hard. The {item} flew up, up, up, and got stuck in a tree.",
        "The wind pulled and pulled, and the {item} flew away into a high tree.",
    )
    s.say(
        "{hx} jumped as high as {he} could, but the branch was too far away.",
        "{h} threw a stick at it. The stick got stuck too!",
        "{h} shook the tree, but only leaves came down.",
    )
    s.say(
        '"Now it will stay there forever," {he} said sadly.',
        '"What shall I do?" {he} asked, and {he} sat down in the grass.',
        '"I will never get it back," sighed {h}.',
    )
    s.para()
    how = s.choose("climb", "ladder", "fly")
    if how == "climb":
        s.say(
            '"I am light, and I climb well," said {f}. Up and up {fhe} went, from branch to branch.',
            'Then {f} said, "Let me try!" Slowly and carefully, {fhe} climbed up the tree.',
        )
        s.say("{f} took the {obj} and came down again.", "At the top, {fhe} took the {item} and waved to {h}.")
    elif how == "ladder":
        s.say(
            'Then {f} had an idea. "Let us get the long ladder!" They carried it to the tree together.',
            '"We need a ladder," said {f}. They ran home and came back with one.',
        )
        s.say(
            "{f} held the ladder while {h} climbed up and took the {obj}.",
            "Step by step, {h} went up, while {f} held the ladder still.",
        )
    else:
        s.say(
            "A blackbird had seen it all. It flew up, took the {item} in its beak, and brought it down.",
            'A blackbird looked down at them. "I can help," it sang, and it pushed the {item} off the branch.',
        )
        s.say('"How kind of you!" said {h}.', "{h} clapped and cheered.")
    s.say(
        "The {obj} was safe again. {h} shared {his} apple with {f} to say thank you.",
        '"Hooray!" cried {h}, holding the {obj} tight. {h} and {f} laughed.',
        "{h} was so glad that {he} hugged {f} and the {item} at the same time.",
    )


@plot(
    "something broken",
    owns=True,
    objects=(*words.TOYS, "lantern", "umbrella", "flute", "cup", "box"),
    morals=(
        "broken things can often be mended",
        "patience and glue can fix a lot",
        "a thing with a story is better than a new one",
    ),
)
def broken(s: Story) -> None:
    s.para()
    s.say(
        "One {day}, {h} ran {to_p} with {his} {item}. {He} ran too fast and fell.",
        "One {day}, {h} was dancing around with {his} {item}. Then {he} tripped over a stone.",
        "One {day}, {h} dropped {his} {item} on the hard ground.",
    )
    s.say("Crack! The {obj} was broken.", "Snap! The {item} broke in two.", "There was a loud crack. Oh no!")
    s.say(
        "{hx} picked up the pieces and began to cry.",
        '"My poor {item}!" {he} cried. Big tears ran down {his} face.',
        "{h} looked at the broken {item} and did not know what to do.",
    )
    s.say(
        '{Adult} heard {him} and came. "Let me see," {ahe} said softly.',
        "{h} carried the pieces home to {adult}.",
        '{His} friend {f} sat down next to {him}. "Let us show it to {adult}," {fhe} said.',
    )
    s.say(
        '"We can mend it," said {adult}. "But we have to be slow and careful."',
        '"It is not too late," said {adult}. "Bring me the glue and some string."',
    )
    s.para()
    s.say(
        "They put the pieces together, one by one. {h} held them still while the glue dried.",
        "{Adult} showed {him} how to use the glue. It took all evening.",
        "They worked at the kitchen table until the stars came out.",
    )
    s.say(
        "In the morning, the {item} was whole again. There was a thin line where it had been broken.",
        "At last, the {obj} looked almost like new. Only a small line could be seen.",
    )
    s.say(
        '"I like it even more now," said {h}.',
        '"Thank you," said {h}. "I will take good care of it."',
        '"The line looks like a smile," said {h}, and {he} laughed.',
    )


@plot(
    "being honest",
    morals=(
        "it feels good to do the right thing",
        "giving something back can bring you a friend",
        "honest hearts make good friends",
    ),
)
def found(s: Story) -> None:
    s.para()
    s.say(
        "One {day}, {h} saw something shiny {spot1}. It was {aobj}!",
        "One {day}, {h} went for a walk {in_p} and found {aobj} {spot1}.",
        "One {day}, while {h} was playing {in_p}, {he} found {aobj}.",
    )
    s.say(
        '"How pretty!" {he} said. "I want to keep it."',
        "It was the nicest {item} {he} had ever seen. {He} wanted to take it home.",
        '{He} looked around, but nobody was there. "Maybe it can be mine," {he} thought.',
    )
    s.say(
        'But then {he} thought, "Somebody must be missing it."',
        "But a small voice inside {him} said that it was not {his} to keep.",
    )
    s.say(
        'So {h} asked {a_helper}, "Is this your {item}?" But {helper} shook {its} head.',
        '{He} went to {a_helper} and asked, "Did you lose {aobj}?" "No," said {helper}. "Go and ask {f}."',
    )
    s.para()
    s.say(
        "Then {he} heard someone crying {spot2}. It was {a_friend}.",
        "A little later, {he} met {a_friend}, who was sitting {spot2} and looked very sad.",
    )
    s.say('"What is wrong?" asked {h}.', '"Why are you crying?" asked {h}.')
    s.say('"I lost my {obj}," said {f}.', '"My {item} is gone," said {f}. "It is {color}, and I love it."')
    s.say(
        '"Here it is!" said {h}. {f} jumped up and hugged {him}.',
        '{h} held out the {obj}. "Is this it?" {f} gave a shout of joy.',
    )
    s.say(
        '"Thank you! Will you be my friend?" asked {f}. "Yes!" said {h}.',
        '"You are so kind," said {f}. "Come and play with me!" And they played until the sun went down.',
        "From then on, {h} and {f} were the best of friends.",
    )


@plot(
    "a gift",
    objects=("hat", "scarf", "blanket", "basket", "kite", "box", "book", "cup", "puppet"),
    morals=(
        "the best gifts are made with love",
        "a gift does not have to be perfect",
        "trying again is the secret",
    ),
)
def gift(s: Story) -> None:
    s.para()
    s.say(
        "It was almost {adult}'s birthday, and {h} had no gift.",
        "{h} wanted to give {adult} something very special.",
    )
    s.say(
        '"I know! I will make {aobj}," {he} said.',
        "{He} thought and thought. At last {he} decided to make {aobj}.",
    )
    s.say(
        "{He} looked for what {he} needed {spot1} and {spot2}. Then {he} began to work.",
        "{He} took paper, string, and some {color} paint, and went to work.",
    )
    s.say(
        "The first {item} was too small. It would only fit a mouse!",
        "The first {item} fell apart as soon as {he} touched it.",
        "The first {item} looked more like a potato.",
    )
    s.say(
        "The second one was better, but it was not right yet.",
        '"Do not give up," said {f}, who was watching. So {h} tried once more.',
        "{h} wanted to stop, but {he} took a deep breath and tried again.",
    )
    s.para()
    s.say(
        "The third {item} was just right. It was {color} and very pretty.",
        "At last the {obj} was ready. One side was a bit crooked, but {h} was proud.",
    )
    s.say(
        '"Happy birthday!" called {h}. {Adult} opened the gift and gave a happy cry.',
        "{Adult} looked at the {item} for a long time. Then {ahe} gave {h} a big hug.",
    )
    s.say(
        '"It is the most beautiful {item} in the world," {ahe} said.',
        '"You made this for me?" {ahe} asked. "I will keep it forever."',
    )


@plot(
    "the wind",
    owns=True,
    objects=("hat", "scarf", "cap", "balloon", "ribbon", "kite"),
    places=words.OUTDOORS,
    morals=(
        "sometimes a bad thing turns into a funny one",
        "it is good to laugh at small troubles",
        "the wind likes to play too",
    ),
)
def wind(s: Story) -> None:
    s.para()
    s.say("One windy day, {h} went for a walk {in_p}.", "One day, a strong wind blew over {p}.")
    s.say(
        "Puff! The wind took the {obj} and carried it away.",
        "Suddenly, the wind stole {his} {item}!",
        "All at once, the {obj} flew off into the air.",
    )
    s.say('"Stop! Come back!" {h} shouted.', '"Hey, wind! That is mine!" cried {h}.')
    s.say(
        "{He} ran after it as fast as {he} could. The {item} landed {spot1}.",
        "{hx} ran and ran. At last the {item} came down {spot1}.",
    )
    s.say(
        "But when {he} reached for it, the wind blew again, and off it went.",
        "{h} almost had it. But the wind was faster, and the {item} danced away.",
    )
    s.say("It flew past {f}, who began to run too.", "{f} saw it and joined the chase.")
    s.para()
    s.say(
        "Then the {item} fell right on the head of {a_helper}!",
        "At last the {obj} came down and covered the nose of {a_helper}.",
    )
    s.say(
        '"Who turned off the light?" asked {helper}.',
        '"What a nice {item}," said {helper}. "Does it suit me?"',
        '"Is it night already?" asked {helper}.',
    )
    s.say(
        "{h} and {f} laughed so hard that they fell over.",
        "{h} began to giggle, and soon everybody was laughing.",
    )
    s.say(
        '"You look very fine," said {h}, "but it is my {item}." And {helper} gave it back.',
        "{h} took the {item} back and held on to it with all {his} might.",
    )


@plot(
    "asking first",
    morals=(
        "you should always ask before you take something",
        "saying sorry is the first step",
        "the truth is the best way to make things right",
    ),
)
def borrowed(s: Story) -> None:
    s.para()
    s.say(
        "{His} friend {f} had {aobj}. {h} liked it very much.",
        "{h} had a friend named {f}, and {f} had {aobj}.",
    )
    s.say(
        "One {day}, {f} was not there, so {h} took the {item} without asking.",
        "One {day}, {h} saw the {item} lying {spot1}. {He} took it and did not ask.",
    )
    s.say(
        '"I will bring it back soon," {he} told {himself}.',
        '"Just for a little while," {he} thought.',
    )
    s.say(
        "But on the way, {he} slipped, and the {obj} fell into the mud.",
        "But {he} did not look where {he} was going. Splash! The {item} fell into a muddy puddle.",
    )
    s.say("Now it was not {color} at all. It was black with mud.", "It looked terrible. {h} felt terrible too.")
    s.say(
        "{hx} wanted to hide it {spot2}. But that did not feel right.",
        '"Maybe nobody will know," {he} thought. But {his} tummy hurt when {he} thought it.',
    )
    s.para()
    s.say(
        'So {h} went to {f}. "I took your {item} and made it dirty," {he} said. "I am sorry."',
        '{He} took a deep breath and went to {f}. "I am so sorry," {he} said. "I should have asked you."',
    )
    s.say(
        "{f} was cross at first. Then {fhe} saw how sorry {h} was.",
        "{f} was quiet for a moment. Then {fhe} nodded.",
    )
    s.say(
        '"Thank you for telling me," said {f}. "Let us wash it."',
        '"Next time, just ask me," said {f}. "I would have said yes!"',
    )
    s.say(
        "They washed the {item} together until it was {color} again.",
        "With soap and water, they made the {obj} clean, and they splashed each other a little too.",
    )


@plot(
    "saving coins",
    morals=(
        "kindness always comes back",
        "helping others is worth more than gold",
        "a kind heart is the greatest treasure",
    ),
)
def coins(s: Story) -> None:
    s.para()
    s.say(
        "In the shop window, {h} saw {aobj}. {He} wanted it more than anything.",
        "There was {aobj} in the little shop. Every day, {h} stopped to look at it.",
    )
    s.say('"It costs ten coins," said the shopkeeper.', "It cost ten coins, and {h} had none.")
    s.say(
        "So {h} worked hard. {He} carried wood, swept floors, and picked apples.",
        "So {he} helped the neighbors. {He} fed the hens, watered the flowers, and carried bags.",
    )
    s.say(
        "Coin by coin, {his} little jar filled up. At last {he} had ten coins!",
        "After many days, {he} counted the coins. Eight, nine, ten!",
    )
    s.say(
        "{h} ran to the shop. On the way, {he} met {f}, who was crying {spot1}.",
        "On the way to the shop, {he} saw {a_friend}, who looked very sad.",
    )
    s.say(
        '"I lost the money for our bread," said {f}. "Now we have nothing to eat."',
        '"My basket of eggs broke," sobbed {f}. "Now I cannot buy medicine for my sister."',
    )
    s.para()
    s.say(
        "{h} looked at {his} coins. Then {he} put them into {f}'s hand.",
        "{h} thought of the {item}. Then {he} thought of {f}. {He} gave away every coin.",
    )
    s.say(
        'The shopkeeper had seen it all from the window. "Come in, {h}," {sk} called.',
        "The next morning, the shopkeeper knocked on {his} door.",
    )
    s.say(
        '"Anyone so kind should have a gift," {sk} said, and gave {him} the {obj}.',
        '"This is for you," {sk} said, and there was the {obj}!',
    )


@plot(
    "a magic wish",
    objects=("lantern", "bell", "whistle", "flute", "box", "cup", "drum", "spinning top", "book"),
    places=words.SOIL,
    morals=(
        "the best wishes are the ones we make for others",
        "real magic is a kind heart",
        "a shared wish is the sweetest one",
    ),
)
def magic(s: Story) -> None:
    s.para()
    s.say(
        "One {day}, {h} found {aobj} {spot1}. When {he} touched it, it began to glow.",
        "One evening, {h} saw a soft light {spot1}. It came from {aobj}!",
    )
    s.say(
        '"I am a magic {item}," said a tiny voice. "You may make one wish."',
        'Then the {item} spoke! "One wish is yours," it said. "Only one."',
    )
    s.say(
        "{hx} thought about it. {He} could wish for a mountain of cake, or for a boat that flies.",
        '"A wish!" thought {h}. "Shall I ask for gold? Or for a crown?"',
    )
    s.say(
        "But it had not rained for weeks. The flowers {in_p} were dry, and the animals were thirsty.",
        "Then {he} looked around. Everything {in_p} was dry and brown, because there was no rain.",
    )
    s.say(
        '{A_helper} came by and said, "I am so thirsty."',
        "{A_helper} lay in the shade, too hot and tired to move.",
    )
    s.para()
    s.say(
        '{h} did not think any longer. "I wish for rain!" {he} said.',
        '"I know my wish," said {h}. "Please make it rain for everyone."',
    )
    s.say(
        "The {obj} shone like a star. Then, plip, plop, the first drops fell.",
        "There was a flash of {color} light. Clouds came, and soon it was raining.",
    )
    s.say(
        "The flowers lifted their heads, and {helper} danced in the rain.",
        'Everything turned green again. "Hooray!" cried {helper}.',
    )
    s.say(
        "The magic was gone, but {h} kept the {item} next to {his} bed.",
        "The {item} never spoke again, but sometimes it winked at {h}.",
    )
