"""What was said earlier in the conversation: facts about the person, the last question, the last answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from .. import words
from ..dialogue import Exchange, Message, assistant, user
from ..grammar import sample, typed
from ..noise import vary


@dataclass(frozen=True)
class Fact:
    value: Callable[[Random], str]
    tell: str  # patterns, with {} for the value
    noted: str
    ask: str
    recall: str
    unknown: str


FACTS = [
    Fact(words.name,
         "my name is {}|i am {}|i am called {}|(hi|hello|hey), i am {}|(hi|hello), my name is {}|call me {}|you can call me {}|{} is my name"
         "|people call me {}|(by the way,|) my name is {}|they call me {}|this is {} (speaking|here)|it is {} here|i am {}, hi|(hi there|hello|hi|hey), {} here|{} here|i go by {}|everyone calls me {}|please call me {}|the name is {}"
         "|my parents named me {}|i am {} and i am new here|{} is what people call me|i answer to {}|my name is actually {}|i introduce myself: {}|(hello|hi) guide, i am {}",
         "Nice to meet you, {}!",
         "what is my name|do you (know|remember|recall) my name|who am i|what am i called|(tell me|say) my name|what did i say my name was"
         "|how am i called|can you (tell me|remember|recall) my name|remember my name|my name is what|what was my name again|and what is my name"
         "|do you still know (my name|who i am|what i am called)|which name (did i (give|tell) you|do i go by|is mine|do i have|did i give)|and my name|my name|who was i again|what name did i give|say my name|do you still know what i am called",
         "Your name is {}.", "You have not told me your name."),
    Fact(lambda random: random.choice(words.COLOURS),
         "my favourite (colour|color) is {}|my favorite (colour|color) is {}|i like the (colour|color) {} best|the (colour|color) i like most is {}|i love the (colour|color) {}",
         "Good choice: {} it is.",
         "(what is|which is|do you remember|do you know|tell me) my (favourite|favorite) (colour|color)|(which|what) (colour|color) do i like [best|most]"
         "|what did i say is my (favourite|favorite) (colour|color)|what was my (favourite|favorite) (colour|color)",
         "Your favourite colour is {}.", "You have not told me your favourite colour."),
    Fact(words.city,
         "i live in {}|i am from {}|my home is in {}|i come from {}|my home town is {}|my city is {}|i am based in {}|i moved to {}|i am living in {}",
         "{}, noted.",
         "where do i live|my city|where is my place|in which (town|place) do i live|where am i from|do you (know|remember|recall) where i live|which city do i live in|what is my (home town|city)|where is my home"
         "|where did i say i live|in which city do i live|what city am i (from|in)|where do i come from",
         "You live in {}.", "You have not told me where you live."),
    Fact(lambda random: str(random.randrange(5, 99)),
         "i am {} years old|my age is {}|i am {} years of age|i turned {} this year|i just turned {}",
         "{} years, noted.",
         "how old am i|my age|what age did i (give|say)|what is my age|do you (know|remember) how old i am|how old did i say i am|do you remember my age|what age am i",
         "You are {} years old.", "You have not told me your age."),
    Fact(lambda random: random.choice(words.JOBS),
         "i am a {}|i work as a {}|my job is {}|my profession is {}|i earn my living as a {}",
         "Being a {} sounds interesting.",
         "what is my (job|profession|occupation|work)|my (job|profession), do you remember|what work do i do|what am i by profession|what do i do [for a living|for work]|do you (know|remember) my (job|profession)|what do i work as",
         "You work as a {}.", "You have not told me your job."),
    Fact(words.name,
         "my (dog|cat|pet|horse)'s name is {}|i have a (dog|cat|pet|horse) called {}|my (dog|cat|pet) is called {}|i have a (dog|cat) named {}|my (dog|cat|pet) is named {}",
         "{} is a lovely name for a pet.",
         "what is my (dog|cat|pet)'s name|what is the (dog|cat)'s name|(say|tell me) my (dog|cat|pet)'s name|my (dog|cat|pet), what was its name|what is my (dog|cat|pet) called|do you remember my (dog|cat|pet)'s name|how is my (dog|cat|pet) called|what is the name of my (dog|cat|pet)"
         "|what did i call my (dog|cat|pet)",
         "Your pet is called {}.", "You have not told me about a pet."),
    Fact(lambda random: random.choice(words.FOODS),
         "my favourite food is {}|i like {} (best|most)|my favorite food is {}|i love {}|i like to eat {}|the food i like (best|most) is {}",
         "I cannot eat, but {} sounds good.",
         "what is my (favourite|favorite) food|(which|what) food do i like [best|most]|do you remember my (favourite|favorite) food|what do i like to eat",
         "Your favourite food is {}.", "You have not told me your favourite food."),
    Fact(lambda random: str(random.randrange(1, 1000)),
         "remember the number {}|(keep in mind|note|memorize|memorise|store) the number {}|my lucky number is {}|my number is {}|the number is {}|please remember {}|the secret number is {}",
         "I will remember {}.",
         "what was the number|my number|the number, please|which number should you have remembered|say the number|which number was that|which number (did i tell you|should you remember|was it)|what is (the|my) number|do you remember the number|tell me the number|what number did i give you|what is my lucky number",
         "The number is {}.", "You have not told me a number."),
    Fact(lambda random: words.made_up(random).lower() if random.random() < 0.5 else random.choice([*words.FRUITS, *words.ANIMALS, *words.THINGS]),
         "remember the word {}|(keep in mind|note|memorize|memorise) the word {}|the (password|code word|secret word|magic word|word) is {}|the word of the day is {}",
         "I will remember {}.",
         "what was the (word|secret word|code word|password|magic word)|which word (did i tell you|should you remember|was it)|what is the (word|secret word|code word|password|magic word)|do you remember the (word|secret word|code word)|tell me the (word|code word)",
         "The word is {}.", "You have not told me a word."),
]  # fmt: skip


def told(fact: Fact, value: str, random: Random) -> list[Message]:
    """The person tells a fact."""
    text = sample(fact.tell, random).format(value)
    return [user(typed(text, random, exact=True, bare=random.random() < 0.7)), assistant(fact.noted.format(value))]


def asked(fact: Fact, value: str | None, random: Random) -> list[Message]:
    """The person asks for a fact; None when it was never told."""
    answer = fact.unknown if value is None else fact.recall.format(value)
    return [user(typed(vary(sample(fact.ask, random), random), random)), assistant(answer)]


LAST_QUESTION = (
    "what did i just (ask|say|write)|what was my (last|previous) (question|message)|repeat my (last|) (question|message)"
    "|what did i ask [you] before|which question did i just ask|what was it that i asked"
)
AGAIN = (
    "(say|repeat) (that|it) [again]|(can|could) you (repeat|say) that [again]|once more|again please|come again|repeat your [last] answer"
    "|what did you [just] say|pardon, what did you say|repeat please|one more time|please repeat|tell me again|what was your (last|) answer"
)


def echo(question: str, answer: str, random: Random) -> list[Message]:
    """A wish to hear the last question or the last answer again."""
    if random.random() < 0.4:
        return [user(typed(sample(LAST_QUESTION, random), random)), assistant(f'You wrote: "{question}"')]
    return [user(typed(sample(AGAIN, random), random, bare=True)), assistant(answer)]


SAY = (
    "(say|write|type|print|repeat|echo) {}|(say|write|repeat) the word {}|(say|write|repeat) {} and nothing else|(please|can you) (say|write|repeat) {}"
    "|repeat after me: {}|answer (only with|with|just) {}|(just|only) say {}|reply with {}|reply with [just|only] the word {}"
)


def make(random: Random) -> Exchange:
    """Saying what one is told to say."""
    text = random.choice(
        [
            lambda: random.choice(
                [*words.FRUITS, *words.ANIMALS, *words.THINGS, *words.COLOURS, "hello", "ok", "yes", "no", "banana"]
            ),
            lambda: words.made_up(random).lower(),
            lambda: " ".join(
                random.sample([*words.FRUITS, *words.ANIMALS, *words.THINGS, *words.COLOURS], random.randrange(2, 5))
            ),
            lambda: (
                f"{random.choice(['hello', 'good morning', 'welcome', 'goodbye', 'thank you'])} {words.name(random)}"
            ),
        ]
    )()
    order = sample(SAY, random)
    return Exchange.of(typed(order, random, exact=True, bare=True).rstrip(".!?").replace("{}", text), text)
