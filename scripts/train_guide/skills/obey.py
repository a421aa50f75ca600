"""Small ways in which a system prompt, or a wish in the question, changes an answer."""

from __future__ import annotations

from random import Random

from .. import intents, words
from ..dialogue import Exchange, assistant, user
from ..grammar import sample, typed

INERT = """You are a helpful assistant.|You are a helpful, honest assistant.|You are a friendly assistant.|Be helpful.|You are guide.
You are an expert.|Answer the user's questions.|You are a helpful assistant that answers questions about localllm.|Help the user.
You are a careful assistant. Answer clearly.|You are an AI assistant.|Be polite and helpful.|You answer questions about this program.
You are a knowledgeable guide to the program localllm.|Answer truthfully.|Keep it simple.|Think before you answer.|Be kind.""".replace(
    "\n", "|"
).split("|")
BRIEF = """Be brief.|Answer with the command only.|Only give the command.|Reply only with the command.|Give just the command, no explanation.
Answer with a command and nothing else.|No explanations, only the command.|Output only the command.""".replace(
    "\n", "|"
).split("|")[1:]
ENDINGS = "(end|finish|close) (every|each|all|your) (answer|reply|answers|message|response) with {}|(always|) (put|write|add|say) {} at the end of (every|each|your) (answer|reply)|your answers [must] end with {}"
OPENINGS = "(begin|start) (every|each|all|your) (answer|reply|answers|message|response) with {}|(always|) (put|write|say) {} (at the start of|before) (every|each|your) (answer|reply)|your answers [must] (begin|start) with {}"
NAMED = "(your name is|you are|you are called|you go by the name of|act as|you are an assistant called|you are an assistant named|you are a helpful assistant named) {}"
ONLY = (
    "(only the command|just the command|command only|the command only|no explanation|nothing but the command|without explanation)"
    "|(give me|tell me|i want|show me) (only|just) the command|answer (only with|with only|with just) the command"
)
WHO = "(who are you|what is your name|what should i call you|how are you called|tell me your name|introduce yourself|do you have a name|what are you called|your name please)"


def make(random: Random) -> Exchange:
    return random.choices([_named, _ending, _opening, _brief, _only, _always], [4, 3, 3, 3, 3, 2])[0](random)


def inert(random: Random) -> str:
    """A system prompt that changes nothing."""
    return random.choice(INERT)


def _some_intent(random: Random, *, command: bool = False) -> intents.Intent:
    return random.choice([intent for intent in intents.load().values() if not command or intent.command])


def _sentence(text: str, random: Random) -> str:
    return text[0].upper() + text[1:] + random.choice([".", ".", ""])


def _token(random: Random) -> str:
    return random.choice(
        ["over", "amen", "sir", "my friend", "captain", "ok", "done", "hello", "yes", "beep", "meow", "ahoy", "cheers",
         words.made_up(random), words.made_up(random).lower(), random.choice(words.ANIMALS), random.choice(words.FRUITS)]
    )  # fmt: skip


def _short_answer(random: Random) -> tuple[str, str]:
    """A question and an answer of few words, so that the wish stays near."""
    while True:
        intent = _some_intent(random)
        answer = intent.answer(random)
        if len(answer) < 200 and "\n" not in answer:
            return typed(intent.question(random), random), answer


def _named(random: Random) -> Exchange:
    name = words.name(random)
    system = _sentence(sample(NAMED, random).replace("{}", name), random)
    return Exchange(
        [user(typed(sample(WHO, random), random)), assistant(f"I am {name}. How can I help you?")], system=system
    )


def _quoted(text: str, random: Random) -> str:
    return random.choice([text, f'"{text}"', f"the word {text}", f'the word "{text}"', f"'{text}'"])


def _ending(random: Random) -> Exchange:
    token = _token(random)
    system = _sentence(sample(ENDINGS, random).replace("{}", _quoted(token, random)), random)
    question, answer = _short_answer(random)
    return Exchange([user(question), assistant(f"{answer} {token}")], system=system)


def _opening(random: Random) -> Exchange:
    token = _token(random)
    system = _sentence(sample(OPENINGS, random).replace("{}", _quoted(token, random)), random)
    question, answer = _short_answer(random)
    return Exchange([user(question), assistant(f"{token}: {answer}")], system=system)


def _brief(random: Random) -> Exchange:
    intent = _some_intent(random, command=True)
    return Exchange(
        [user(typed(intent.question(random), random)), assistant(f"`{intent.command}`")], system=random.choice(BRIEF)
    )


def _only(random: Random) -> Exchange:
    intent = _some_intent(random, command=True)
    question, wish = typed(intent.question(random), random), sample(ONLY, random)
    text = f"{question} {_sentence(wish, random)}" if random.random() < 0.6 else f"{wish}: {question}"
    return Exchange.of(text, f"`{intent.command}`")


def _always(random: Random) -> Exchange:
    word = random.choice(["yes", "no", "maybe", "beep", "hello", "42", "ok", words.made_up(random).lower()])
    system = sample(
        "(always|only) (answer|reply|say) {}|answer (everything|every question|all questions) with {}|whatever i (say|ask), (answer|reply|say) {}",
        random,
    )
    intent = _some_intent(random)
    system = _sentence(system.replace("{}", random.choice([word, f'"{word}"'])), random)
    return Exchange([user(typed(intent.question(random), random)), assistant(word)], system=system)
