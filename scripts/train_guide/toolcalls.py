"""Toy tools: choose the right tool, copy its arguments from the question, then repeat its result.

Names of tools and parameters vary, so the model must read the schema.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from . import words
from .chatml import Conversation, Message, assistant, user
from .grammar import sample, typed
from .topics import filled, load


@dataclass(frozen=True)
class Tool:
    """Values such as `{city}` are slots of topics.py; a slot of numbers makes an integer."""

    names: str  # alternatives, with | between them
    description: str
    parameters: tuple[tuple[str, str], ...]  # (alternatives of the name, value)
    asks: str  # a pattern with {0} for the first argument
    result: dict[str, str]
    reply: str  # the last answer, with the arguments and the values of the result


CITY = ("city|location|place|town", "{city}")
TOOLS = (
    Tool("get_weather|weather|current_weather|lookup_weather", "(Get|Return) the [current] weather of a city", (CITY,),
         "(what is|how is|tell me|check) the weather (in|for) {0} [today|now]|weather in {0}|is it (raining|cold|warm|sunny) in {0} [now]"
         "|do i need (an umbrella|a coat) in {0}|how (warm|cold) is it in {0}|what is the temperature in {0} [now]",
         {"temperature": "{degrees}", "condition": "{sky}"}, "It is {temperature} °C and {condition} in {0}."),
    Tool("get_time|current_time|time_in|world_clock", "(Get|Return) the [local] time in a city", (CITY,),
         "what time is it in {0} [now]|(tell me|get|what is) the [local] time in {0}|how late is it in {0}",
         {"time": "{time}"}, "It is {time} in {0}."),
    Tool("add|add_numbers|sum|plus", "Add two numbers", (("a|x|first|left", "{integer}"), ("b|y|second|right", "{integer}")),
         "(what is|how much is|calculate|compute) {0} (plus|+) {1}|add {0} and {1}|{0} + {1}|the sum of {0} and {1}",
         {"result": "{integer}"}, "The result is {result}."),
    Tool("multiply|multiply_numbers|product|times", "Multiply two numbers", (("a|x|first|left", "{integer}"), ("b|y|second|right", "{integer}")),
         "(what is|how much is|calculate) {0} (times|*|multiplied by) {1}|multiply {0} (and|by|with) {1}|the product of {0} and {1}",
         {"result": "{integer}"}, "The result is {result}."),
    Tool("send_message|send_email|message|send_text", "Send a message to somebody", (("name|person|to|recipient", "{name}"), ("text|message|body", "{note}")),
         "(send|write|text) {0} [the message]: {1}|tell {0}: {1}|(send|write) a message to {0}: {1}|let {0} know: {1}",
         {"sent": "yes"}, "I sent the message to {0}."),
    Tool("set_timer|timer|start_timer|countdown", "(Start|Set) a timer", (("minutes|duration|length", "{small}"),),
         "(set|start) a timer (for|of) {0} minutes|(wake|remind) me in {0} minutes|timer {0} minutes",
         {"started": "yes"}, "The timer runs for {0} minutes."),
    Tool("search|web_search|find_pages|lookup", "Search (the web|documents) for words", (("query|q|words|term", "{word} {topic}"),),
         "(search|search the web|look) for {0}|(find|google|look up) {0} [online]|search {0}|what does the web say about {0}",
         {"title": "{Word} {Word}"}, "I found: {title}."),
    Tool("translate|translate_text|translation", "Translate text to another language", (("text|word|phrase", "{word}"), ("language|target|to", "{tongue}")),
         "translate {0} (to|into) {1}|what is {0} in {1}|how do you say {0} in {1}",
         {"translation": "{word}"}, "In {1} that is {translation}."),
    Tool("get_price|price_of|lookup_price|quote", "Get the price of a product", (("product|item|article", "{word}"),),
         "how much is [the] {0}|what does [the] {0} cost|(what is|get|tell me) the price of [the] {0}",
         {"price": "{small}", "currency": "EUR"}, "It costs {price} {currency}."),
    Tool("turn_on_light|light_on|lamp_on|lights", "Turn on the light in a room", (("room|where|place", "{room}"),),
         "(turn|switch) on the (light|lights|lamp) in the {0}|{0} lights on|it is dark in the {0}",
         {"on": "yes"}, "The light in the {0} is on."),
    Tool("get_user|find_user|lookup_user|get_customer", "Find a user by number", (("id|user_id|number", "{n}"),),
         "(who is|get|find|show|look up) (user|customer) {0}|which (user|customer) has the (id|number) {0}",
         {"name": "{name}", "city": "{city}"}, "That is {name} from {city}."),
    Tool("read_file|open_file|cat|show_file", "Read a [text] file", (("path|file|filename", "{word}.{ending}"),),
         "(read|show|open|print) [the file] {0}|what is in [the file] {0}|show me the contents of {0}",
         {"text": "{Word} {word} {word}"}, "The file says: {text}"),
)  # fmt: skip


@dataclass(frozen=True)
class Offer:
    """A tool with the names that one conversation gives it."""

    tool: Tool
    name: str
    keys: tuple[str, ...]
    schema: Message

    @classmethod
    def of(cls, tool: Tool, random: Random) -> Offer:
        name = random.choice(tool.names.split("|"))
        if random.random() < 0.15:
            name = f"{words.made_up(random).lower()}_{name}"
        keys = tuple(random.choice(names.split("|")) for names, _ in tool.parameters)
        if random.random() < 0.1:
            keys = tuple(f"{key}_{words.made_up(random).lower()}" for key in keys)
        types = ["integer" if value in ("{n}", "{small}", "{integer}") else "string" for _, value in tool.parameters]
        properties = {key: {"type": kind} for key, kind in zip(keys, types, strict=True)}
        function: Message = {"name": name, "description": sample(tool.description, random)}
        function["parameters"] = {"type": "object", "properties": properties, "required": list(keys)}
        return cls(tool, name, keys, {"type": "function", "function": function})

    def call(self, values: list[Any]) -> Message:
        arguments = dict(zip(self.keys, values, strict=True))
        return {"type": "function", "function": {"name": self.name, "arguments": arguments}}


def make(random: Random, answers: dict[str, str]) -> Conversation:
    """A conversation with tools. In some, the question is about localllm and needs no tool.

    `answers`: name of a topic -> its answer.
    """
    offers = [Offer.of(tool, random) for tool in random.sample(TOOLS, random.choice([1, 1, 2, 2, 3]))]
    if random.random() < 0.15:
        topic = random.choice([topic for topic in load() if topic.name in answers and (topic.how or topic.ask)])
        messages = [user(typed(topic.question(random), random)), assistant(answers[topic.name])]
    else:
        messages = _use(offers[0], random)
    random.shuffle(offers)
    system = random.choice(
        ["", "You are a helpful assistant.", "Use the tools when they help.", "You can call functions."]
    )
    return Conversation(messages, system, [offer.schema for offer in offers])


def _use(offer: Offer, random: Random) -> list[Message]:
    tool = offer.tool
    values = [_value(value, random) for _, value in tool.parameters]
    several = len(values) == 1 and random.random() < 0.15
    calls = [[value] for value in (*values, _value(tool.parameters[0][1], random))] if several else [values]
    asked = [f"{calls[0][0]} and {calls[1][0]}"] if several else values
    question = sample(tool.asks, random).format(*asked)
    messages = [
        user(typed(question, random, exact=True, bare=random.random() < 0.5)),
        {"role": "assistant", "content": "", "tool_calls": [offer.call(one) for one in calls]},
    ]
    if random.random() < 0.25:
        return messages
    results = [{key: _value(value, random) for key, value in tool.result.items()} for _ in calls]
    replies = [tool.reply.format(*one, **result) for one, result in zip(calls, results, strict=True)]
    if not several and random.random() < 0.08:
        results, replies = [{"error": "not found"}], ["The tool reports an error: not found."]
    return [*messages, *({"role": "tool", "content": json.dumps(one)} for one in results), assistant(" ".join(replies))]


def _value(slot: str, random: Random) -> Any:
    text = filled(slot, random)
    return int(text) if text.removeprefix("-").isdigit() else text == "yes" or text
