"""Plots about friends, family and neighbors."""

from __future__ import annotations

import story_words as words
from story_state import Story, plot


@plot(
    "sharing",
    owns=True,
    objects=words.TOYS,
    morals=(
        "sharing makes every game more fun",
        "a toy is twice as nice when you share it",
        "it is better to play together than alone",
    ),
)
def sharing(s: Story) -> None:
    s.para()
    s.say(
        "One {day}, {h} was playing {in_p}. {A_friend} came and watched.",
        "One {day}, {h} took {his} {item} {to_p}. There {he} met {a_friend}.",
    )
    s.say('"May I play with your {item}?" asked {f}.', '"That looks like fun," said {f}. "May I try?"')
    s.say(
        '"No," said {h}. "It is mine!" And {he} held the {item} tight.',
        '{h} shook {his} head. "You might break it," {he} said.',
    )
    s.say(
        "{f} looked down and walked away. {h} played alone, but it was not much fun.",
        "{f} went away without a word. {h} tried to play, but the game felt empty.",
    )
    s.say(
        '{A_helper} had seen it. "A game for one is a lonely game," said {helper}.',
        '"Why do you look so sad?" asked {a_helper}. "You have such a nice {item}."',
        "{He} looked at the {obj} and sighed. It did not seem so bright anymore.",
    )
    s.para()
    s.say(
        "{h} thought about it. Then {he} ran after {f}.",
        "So {h} went to look for {f}. {He} found {fhim} {spot1}.",
    )
    s.say(
        '"I am sorry," {he} said. "Would you like to play with me?"',
        '"Wait!" {he} called. "We can take turns!"',
    )
    s.say("{f} smiled a big smile.", '"Yes, please!" said {f}.', "{f} jumped for joy.")
    s.say(
        "They played with the {obj} until the sun went down.",
        "First {h} had a turn, then {f}. They laughed all afternoon.",
        "{f} even knew a new game, and it was the best game of all.",
    )


@plot(
    "a new friend",
    morals=(
        "a friendly word can open any door",
        "every friend was once a stranger",
        "a small hello can change a whole day",
    ),
    owns=True,
)
def new_friend(s: Story) -> None:
    s.para()
    s.say(
        "One day, a new family moved in near {p}. They had a child, {a_friend}.",
        "One day, {a_friend} came to live near {p}.",
    )
    s.say(
        "{f} was very shy. {Fhe} hid {spot1} and did not speak to anyone.",
        "{f} did not know anybody, so {fhe} sat alone {spot1}.",
    )
    s.say(
        '"Hello!" said {h}. But {f} only looked at the ground.',
        "{h} waved, but {f} was too shy to wave back.",
    )
    s.say(
        "{hx} did not give up. The next day, {he} came back with {his} {obj}.",
        "{h} had an idea. {He} went home and came back with {his} {obj}.",
    )
    s.say(
        "{He} put the {item} on the ground, sat down, and waited.",
        '"You can hold it if you like," {he} said softly.',
    )
    s.para()
    s.say(
        "Slowly, {f} came closer. {Fhe} touched the {item} and smiled.",
        'For a long time, nothing happened. Then a small voice said, "I like your {item}."',
    )
    s.say(
        '"What is your name?" asked {h}. "{f}," said {f}.',
        '"My name is {f}," {fhe} said. "Will you play with me?"',
    )
    s.say(
        "Soon they were running around {p} like old friends.",
        "They talked and laughed and ate cookies until it was dark.",
    )
    s.say("{f} was not shy anymore.", '"See you tomorrow!" called {f}.')


@plot(
    "a race",
    morals=(
        "a friend is worth more than a prize",
        "helping is better than winning",
        "there are many ways to win",
    ),
    places=words.OUTDOORS,
)
def race(s: Story) -> None:
    s.para()
    s.say(
        "One day, there was a big race {in_p}. The prize was {aobj}.",
        "Everybody {in_p} was excited. Today was the big race, and the winner would get {aobj}.",
    )
    s.say(
        "{h} wanted to win. {He} had practiced every day.",
        '"I will run like the wind," said {h}.',
    )
    s.say('"Ready, steady, go!" called {a_helper}.', '{A_helper} counted. "One, two, three, go!"')
    s.say(
        "{h} ran fast. Soon {he} was ahead of all the others. Only {f} was near.",
        "{h} and {f} ran side by side, and left the others behind.",
    )
    s.say(
        "Then {h} heard a cry. {f} had tripped over a root.",
        'Suddenly {f} fell. "Ouch, my foot!" {fhe} cried.',
    )
    s.say(
        "{hx} looked at the finish line. It was so close! Then {he} looked back.",
        "{h} could see the {obj} at the finish line. But {he} stopped.",
    )
    s.para()
    s.say(
        '"Lean on me," said {h}, and {he} helped {f} to stand up.',
        '{h} ran back to {f}. "Put your arm around me," {he} said.',
    )
    s.say(
        "Slowly, they walked to the finish line together. They were the very last.",
        "They crossed the finish line last, arm in arm.",
    )
    s.say(
        "But everyone cheered for them louder than for the winner.",
        '"Hooray for {h}!" everybody shouted.',
    )
    s.say(
        '"The prize goes to the kindest runner," said {helper}, and gave the {obj} to {h}.',
        'The winner came and gave {h} the {item}. "You should have it," the winner said.',
    )


@plot(
    "a quarrel",
    objects=(*words.TOYS, "hat", "scarf", "umbrella", "blanket", "basket"),
    morals=(
        "taking turns is better than fighting",
        "a friend is more important than a toy",
        "a kind word can end any fight",
    ),
)
def quarrel(s: Story) -> None:
    s.para()
    s.say(
        "One {day}, {h} and {his} friend {f} found {aobj} {spot1}.",
        "One {day}, {h} and {f} were walking {in_p} when they saw {aobj} {spot1}.",
    )
    s.say(
        '"I saw it first!" said {h}. "No, I did!" said {f}.',
        '"It is mine!" cried {h}. "No, mine!" cried {f}.',
    )
    s.say(
        "{h} pulled on one side, and {f} pulled on the other.",
        "They both took hold of the {item} and pulled.",
    )
    s.say(
        "Plop! The {obj} fell into a puddle, and both of them sat in the mud.",
        "They pulled so hard that they fell over backward, right into a big puddle.",
    )
    s.say(
        '"Now look what you did!" they both said.',
        "For a while, nobody said a word.",
    )
    s.para()
    s.say(
        "Then {h} saw the mud on {f}'s nose and began to giggle. {f} giggled too.",
        "{h} looked at {f}. {f} looked at {h}. They were brown from head to toe, and they began to laugh.",
    )
    s.say(
        '"I am sorry," said {h}. "Me too," said {f}.',
        '"Let us not fight," said {f}. "You are right," said {h}.',
    )
    s.say(
        '"You can have it today, and I can have it tomorrow," said {h}.',
        '"Let us share it," said {f}. "One day for you, one day for me."',
    )
    s.say(
        "So they washed the {item} and played together all day.",
        "They cleaned the {obj}, and from then on it belonged to both of them.",
    )


@plot(
    "telling the truth",
    owns=True,
    objects=("ball", "drum", "toy boat", "toy train", "kite", "wagon", "hoop", "spinning top"),
    morals=(
        "it is always best to tell the truth",
        "the truth makes a heavy heart light",
        "being honest takes courage",
    ),
)
def truth(s: Story) -> None:
    s.para()
    s.say(
        "One rainy day, {h} played with the {item} in the kitchen.",
        "One day, it was too wet to go {to_p}, so {h} played with {his} {item} inside.",
    )
    s.say(
        "Crash! The {item} hit {adult}'s best vase, and it broke into pieces.",
        "Then the {item} bumped into the table. {Adult}'s favorite vase fell down and broke.",
    )
    s.say(
        "{hx} was scared. {He} hid the pieces under the bed.",
        "{h} did not know what to do, so {he} swept the pieces under the rug.",
    )
    s.say('"Where is my vase?" asked {adult} in the evening.', '"Did you see my vase?" asked {adult}.')
    s.say('"Maybe the wind took it," said {h}.', '"I do not know," said {h} in a small voice.')
    s.say(
        "That night, {he} could not sleep. The lie felt like a stone in {his} tummy.",
        "{His} dinner did not taste good. {He} felt sad and heavy inside.",
    )
    s.para()
    s.say(
        'At last, {h} went to {adult}. "I broke your vase," {he} whispered. "I am sorry."',
        '"I have to tell you something," {h} said to {adult}. "I broke the vase with my {item}."',
    )
    s.say(
        '{Adult} took {him} in {ahis} arms. "Thank you for telling me," {ahe} said.',
        '{Adult} was quiet for a moment. Then {ahe} smiled. "I am glad that you told me," {ahe} said.',
    )
    s.say(
        "Together they glued the vase and put fresh flowers in it.",
        "The next day, they made a new vase out of clay. It was a bit funny, but they both loved it.",
    )
    s.say("{h} felt as light as a feather.", "Now {h} could sleep well again.")


@plot(
    "a birthday",
    morals=(
        "good friends never forget you",
        "good things are worth waiting for",
        "the best surprise is to be loved",
    ),
)
def birthday(s: Story) -> None:
    s.para()
    s.say(
        "One morning, {h} woke up early. It was {his} birthday!",
        'Today was {his} birthday. "Hooray!" said {h}.',
    )
    s.say(
        'But {adult} only said, "Good morning." {Ahe} did not say a word about it.',
        "{He} ran to the kitchen, but nobody was there. There was no cake at all.",
    )
    s.say(
        '{hx} went {to_p} and met {f}. "Do you know what day it is?" {he} asked.',
        'So {he} went to {f}\'s house. "Is today a special day?" {he} asked.',
    )
    s.say('"It is just a day," said {f}, and hurried off.', '"I do not think so," said {f}. "I have to go now."')
    s.say(
        '"Everybody forgot me," thought {h}. {He} sat down {spot1} and felt very alone.',
        "{h} walked around all day with a sad face. {He} sat {spot1} and sighed.",
    )
    s.para()
    s.say(
        "In the evening, {he} went home. The house was dark and quiet.",
        "When the sun went down, {he} walked slowly home and opened the door.",
    )
    s.say(
        '"Surprise!" everybody shouted. The lights went on.',
        'Suddenly the lights went on. "Happy birthday, {h}!" everyone cried.',
    )
    s.say(
        "There were {f}, {adult}, and all {his} friends, and a cake as big as a wheel.",
        "There was {f} with a cake, and all {his} friends were singing.",
    )
    s.say(
        'And {f} gave {him} {aobj}. "We made it for you," {fhe} said.',
        "{Adult} gave {him} a box, and inside was {aobj}.",
    )


@plot(
    "a grumpy neighbor",
    morals=(
        "a kind word can melt a cold heart",
        "grumpy people are sometimes just lonely",
        "it is good to look twice at people",
    ),
    owns=True,
)
def neighbor(s: Story) -> None:
    s.para()
    s.say(
        "Near {p} lived old Mr. Brown. He was always grumpy, and all the children ran away from him.",
        "Next door lived old Mr. Brown. He never smiled, and everybody was a little afraid of him.",
    )
    s.say(
        "One {day}, {h} lost {his} {item}. It was right behind Mr. Brown's fence!",
        "One {day}, the {obj} landed in Mr. Brown's yard.",
    )
    s.say(
        '"Do not go in there," whispered {f}. "He will shout at you!"',
        '"Oh no," said {f}. "Now it is gone forever."',
    )
    s.say(
        "{hx} was scared, but {he} knocked on the door. Knock, knock!",
        "But {h} walked up to the door and knocked.",
    )
    s.say('"What do you want?" asked Mr. Brown.', '"Who is there?" said a deep voice.')
    s.say(
        '"Please, sir, may I have my {item} back?" asked {h}. "And would you like a cookie?"',
        '"I am {h}," {he} said. "I came to get my {item}. Your flowers are very pretty!"',
    )
    s.para()
    s.say(
        "Mr. Brown looked surprised. Nobody had been so nice to him for a long time.",
        "Mr. Brown opened his mouth and closed it again. Then, very slowly, he smiled.",
    )
    s.say(
        'He gave {h} the {obj}. "Would you like some tea?" he asked.',
        'He brought the {obj} and said, "Come in. I will tell you a story about the sea."',
    )
    s.say(
        "After that, {h} and {f} visited him every week.",
        "It turned out that Mr. Brown told the best stories of all, and he was never grumpy again.",
    )


@plot(
    "a sick friend",
    owns=True,
    objects=("blanket", "teddy bear", "book", "puppet", "scarf", "bell", "toy train", "flute"),
    morals=(
        "a good friend is the best medicine",
        "little acts of love help more than we think",
        "friends take care of each other",
    ),
)
def sick(s: Story) -> None:
    s.para()
    s.say(
        "One {day}, {h} waited for {his} friend {f} {in_p}, but {f} did not come.",
        "One {day}, {h} went to play with {f}. But {f} was ill in bed.",
    )
    s.say(
        '"{f} has a cold," said {a_helper}. "{Fhe} has to stay in bed."',
        "{f} had a red nose and a very bad cough.",
    )
    s.say(
        '"Poor {f}! I will help," said {h}.',
        '"I must do something," thought {h}.',
    )
    s.say(
        "{He} went home and cooked hot soup with {adult}.",
        "{He} picked flowers {in_p} and made tea with honey.",
    )
    s.say(
        "Then {he} packed {his} {obj} as well.",
        "And because {f} looked so sad, {he} brought {his} {obj} too.",
    )
    s.para()
    s.say(
        '"Here," said {h}. "You can have my {item} until you feel better."',
        '"This {item} always makes me feel better," said {h}. "Now it can help you."',
    )
    s.say(
        "{h} sat by the bed and told funny stories. {f} laughed, and the cough grew smaller.",
        "{h} sang a song, and {f} fell asleep with the {item} next to {fhim}.",
    )
    s.say(
        "After three days, {f} was well again.",
        "The next morning, {f} already felt much better.",
    )
    s.say(
        '{f} gave the {item} back. "You are the best friend I know," {fhe} said.',
        '"Thank you for everything," said {f}, and they ran {to_p} to play.',
    )


@plot(
    "working together",
    places=words.SOIL,
    objects=("wagon", "basket", "toy boat", "ball", "drum", "bell", "box"),
    morals=(
        "together we can do what no one can do alone",
        "even the smallest helper counts",
        "many hands make light work",
    ),
)
def teamwork(s: Story) -> None:
    thing = s.choose("stone", "pumpkin", "log")
    s.set(thing=thing)
    s.para()
    s.say(
        "One {day}, {h} saw {aobj} {in_p}. But a huge {thing} lay on top of it!",
        "One {day}, a big {thing} rolled down and landed on {aobj} {spot1}. {h} saw it.",
    )
    s.say(
        "{He} pushed and pushed, but the {thing} did not move.",
        "{hx} pushed with all {his} might. The {thing} did not move at all.",
    )
    s.say('"I need help!" {he} called.', '"This is too heavy for me," {he} said.')
    s.say(
        "{f} came to help. They pushed together. The {thing} shook a little, but it stayed where it was.",
        "{f} heard {him} and came running. Now they were two, but the {thing} was still too heavy.",
    )
    s.say(
        "Then {a_helper} came and pushed as well. Still nothing!",
        '"Let me try too," said {a_helper}. All three of them pushed and puffed.',
    )
    s.para()
    s.say(
        'At last a tiny ant came by. "May I help?" asked the ant. Everybody laughed.',
        '"I can help," said a very small voice. It was an ant. "You?" said {f}. "You are so tiny!"',
    )
    s.say(
        '"Every bit helps," said {h}. "One, two, three, push!"',
        '"Come on," said {h}. "All together now!"',
    )
    s.say(
        "And the {thing} rolled away! There was the {obj}, without a scratch.",
        "Rumble, rumble! The {thing} rolled to the side, and the {obj} was free.",
    )
    s.say(
        'They all danced around it, and the ant danced on top. "We did it!" they sang.',
        '"Hooray for the ant!" they all shouted, and they played with the {item} together.'
        if s.item in words.TOYS
        else '"Hooray for the ant!" they all shouted.',
    )


@plot(
    "hide and seek",
    owns=True,
    objects=("bell", "ribbon", "hat", "scarf", "cap", "balloon", "blanket", "whistle"),
    morals=(
        "a good friend never stops looking for you",
        "it is nice to hide, but it is nicer to be found",
        "the best part of hiding is being found",
    ),
)
def hide_and_seek(s: Story) -> None:
    s.para()
    s.say(
        "One {day}, {h} and {f} played hide and seek {in_p}. {f} had to count.",
        '"Let us play hide and seek!" said {f} one {day}. "I will count to ten."',
    )
    s.say(
        "{h} took {his} {item} and hid {spot1}.",
        "{hx} ran on tiptoe and hid {spot1}, with the {obj} close to {him}.",
    )
    s.say(
        "It was soft and warm there. Soon {his} eyes closed, and {he} fell asleep.",
        "{He} waited and waited. It was so quiet that {he} fell asleep.",
    )
    s.say(
        "{f} looked {spot2}. {Fhe} looked {spot3}. No {h}!",
        '"Ready or not, here I come!" called {f}. {Fhe} searched {spot2} and {spot3}, but found nobody.',
    )
    s.say('"{h}, where are you?" called {f}. But there was no answer.', "It grew late, and {f} began to worry.")
    s.para()
    if s.item in ("bell", "whistle"):
        s.say(
            "Then {fhe} heard a tiny sound. It was the {item}! {h} had rolled over in {his} sleep.",
            "Then the wind moved the {item}, and it made a little sound.",
        )
    else:
        s.say(
            "Then {fhe} saw something {color}. It was a corner of the {item}!",
            "Then {f} saw a bit of {color} {spot1}. It was the {item}!",
        )
    s.say(
        '"Found you!" cried {f}. {h} opened one eye. "Is it morning?" {he} asked.',
        '{f} looked down and laughed. "Wake up, sleepyhead!" {fhe} said.',
    )
    s.say(
        '{h} laughed too. "I won, but I missed the game," {he} said.',
        '"You hide so well that you lost yourself," said {f}, and they both laughed.',
    )


@plot(
    "stage fright",
    owns=True,
    objects=("drum", "flute", "whistle", "bell", "puppet"),
    avoid=("brave",),
    morals=(
        "being brave means trying even when you are afraid",
        "a friend in the first row helps a lot",
        "a little mistake does not spoil a song",
    ),
)
def stage(s: Story) -> None:
    s.para()
    s.say(
        "Soon there would be a big show {in_p}, and {h} wanted to be in it with {his} {item}.",
        'One day, {a_helper} said, "There will be a show {in_p}. Will you bring your {item}?" {h} said yes.',
    )
    s.say(
        "{He} practiced every morning and every night.",
        "{h} practiced so much that even the birds knew the song.",
    )
    s.say(
        "But when the day came, {his} knees began to shake.",
        "Then the day of the show came. So many eyes were looking! {hx} felt cold and small.",
    )
    s.say(
        '"I cannot do it," {he} whispered. "What if I make a mistake?"',
        '"I want to go home," {he} said softly.',
    )
    s.say(
        '{f} took {his} hand. "Just look at me," {fhe} said. "I will be in the first row."',
        '"Look only at me," said {f}. "Pretend we are alone {in_p}."',
    )
    s.para()
    s.say(
        "So {h} went out, held the {obj}, and looked at {f}. Then {he} began.",
        "{h} took a deep breath and stepped out with the {obj}.",
    )
    s.say(
        "Once {he} made a tiny mistake, but {f} smiled, and {he} went on.",
        "At first it was very quiet. Then it grew better and better.",
    )
    s.say(
        'When it was over, everybody clapped and shouted, "More! More!"',
        "At the end, the people clapped so loudly that the birds flew up.",
    )
    s.say('"You did it!" cried {f}.', '"That was the best show ever," said {f}.')
