"""Toy tools: choose the right one, copy its arguments from the question, then tell what it returned.

Names of tools and parameters vary, so the schema has to be read rather than known.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from .. import intents, words
from ..dialogue import Exchange, Message, assistant, user
from ..grammar import sample, typed

Value = Callable[[Random], Any]


@dataclass(frozen=True)
class Parameter:
    names: tuple[str, ...]  # any of them may be its name
    type: str
    value: Value
    words: str = ""  # its description


@dataclass(frozen=True)
class Tool:
    names: tuple[str, ...]
    description: str  # a pattern
    parameters: tuple[Parameter, ...]
    asks: tuple[str, ...]  # patterns with {0} for the first argument
    result: Callable[[Random], dict[str, Any]]
    told: str  # the final answer, with the arguments and the result's values


def _task(random: Random) -> str:
    return sample(random.choice(words.TASKS), random)


def _time(random: Random) -> str:
    return f"{random.randrange(24):02d}:{random.choice(['00', '15', '30', '45'])}"


def _word(random: Random) -> str:
    return (
        words.made_up(random).lower()
        if random.random() < 0.4
        else random.choice([*words.FRUITS, *words.ANIMALS, *words.THINGS])
    )


def _number(top: int) -> Value:
    return lambda random: random.randrange(1, top)


CITY = Parameter(("city", "location", "place", "town"), "string", words.city, "Name of the city")
PERSON = Parameter(("name", "person", "contact", "to", "recipient"), "string", words.name, "Who")
TOOLS = [
    Tool(("get_weather", "weather", "current_weather", "fetch_weather", "lookup_weather", "get_forecast"),
         "(Get|Look up|Return) the [current] weather (of|in|for) a city", (CITY,),
         ("(what is|how is|tell me|get|check|look up) the weather (in|for|of) {0} [today|now|right now]", "[what is the] weather in {0}",
          "is it (raining|cold|warm|sunny|hot|windy) in {0} [today|now]", "(do i need|should i take) (an umbrella|a coat) in {0}",
          "how (warm|cold|hot) is it in {0} [today|now]", "what is the temperature in {0} [now|today]", "i am going to {0}, how is the weather there"),
         lambda random: {"temperature": random.randrange(-10, 36), "condition": random.choice("sunny cloudy rainy windy snowy clear foggy".split())},
         "It is {temperature} °C and {condition} in {0}."),
    Tool(("get_time", "current_time", "time_in", "local_time", "clock", "world_clock"), "(Get|Return) the [local|current] time (in|of) a city", (CITY,),
         ("what time is it in {0} [now|right now]", "(tell me|get|what is) the [current|local] time in {0}", "how late is it in {0}", "which time is it in {0}"),
         lambda random: {"time": _time(random)}, "It is {time} in {0}."),
    Tool(("add", "add_numbers", "sum", "plus", "calculate_sum"), "Add two [whole] numbers",
         (Parameter(("a", "x", "first", "left"), "integer", _number(10000), "First number"), Parameter(("b", "y", "second", "right"), "integer", _number(10000), "Second number")),
         ("(what is|how much is|calculate|compute|work out) {0} (plus|+) {1}", "add {0} and {1}", "add {1} to {0}", "{0} + {1}", "the sum of {0} and {1}"),
         lambda random: {"result": random.randrange(20000)}, "The result is {result}."),
    Tool(("multiply", "multiply_numbers", "product", "times"), "Multiply two [whole] numbers",
         (Parameter(("a", "x", "first", "left"), "integer", _number(10000), "First number"), Parameter(("b", "y", "second", "right"), "integer", _number(10000), "Second number")),
         ("(what is|how much is|calculate|compute) {0} (times|*|multiplied by) {1}", "multiply {0} (and|by|with) {1}", "{0} * {1}", "the product of {0} and {1}"),
         lambda random: {"result": random.randrange(20000)}, "The result is {result}."),
    Tool(("send_message", "send_email", "message", "send_text", "write_message"), "Send a [short] message to somebody",
         (PERSON, Parameter(("text", "message", "body", "content"), "string", lambda random: random.choice(["hello", "i am late", "see you soon", "thank you", "call me", "happy birthday", _task(random), "dinner is ready", "the meeting is at " + _time(random)]), "What to say")),
         ("(send|write|text) {0} [the message]: {1}", "tell {0}: {1}", "(send|write) a message to {0}: {1}", "(send|write) {0} a message saying {1}", "let {0} know: {1}", 'send "{1}" to {0}'),
         lambda random: {"sent": True}, "I sent the message to {0}."),
    Tool(("set_timer", "timer", "start_timer", "countdown"), "(Start|Set) a timer", (Parameter(("minutes", "duration", "length"), "integer", _number(120), "Minutes"),),
         ("(set|start|make) a timer (for|of) {0} minutes", "[set a] timer {0} minutes", "wake me in {0} minutes", "remind me in {0} minutes", "count down {0} minutes", "{0} minute timer"),
         lambda random: {"started": True}, "The timer runs for {0} minutes."),
    Tool(("set_alarm", "alarm", "wake_up", "create_alarm"), "Set an alarm [clock]", (Parameter(("time", "at", "when"), "string", _time, "Time as HH:MM"),),
         ("(set|make) an alarm (for|at) {0}", "wake me [up] at {0}", "[set the] alarm (at|for) {0}", "i have to get up at {0}"),
         lambda random: {"ok": True}, "The alarm is set for {0}."),
    Tool(("add_task", "create_todo", "add_todo", "new_task", "remember_task"), "Add (a task|an item) to the to-do list", (Parameter(("task", "title", "text", "item"), "string", _task, "What to do"),),
         ("(add|put) {0} (to|on) my (list|to-do list|tasks|todo list)", "remind me to {0}", "(new task|todo|new todo|add a task): {0}", "i must not forget to {0}", "note that i have to {0}"),
         lambda random: {"id": random.randrange(1, 100)}, "I added it to your list: {0}."),
    Tool(("search", "web_search", "search_web", "find_pages", "lookup"), "Search (the web|pages|documents) for (words|a query)", (Parameter(("query", "q", "words", "text", "term"), "string", lambda random: f"{_word(random)} {random.choice(['recipes', 'prices', 'history', 'pictures', 'shops', 'news', 'facts'])}", "What to look for"),),
         ("(search|search the web|look|search the internet) for {0}", "(find|google|look up) {0} [on the web|online]", "search {0}", "what does the web say about {0}"),
         lambda random: {"title": f"{words.made_up(random)} {words.made_up(random)}"}, "I found: {title}."),
    Tool(("translate", "translate_text", "translator", "translation"), "Translate (text|a word) to another language",
         (Parameter(("text", "word", "phrase"), "string", _word, "What to translate"), Parameter(("language", "target", "to", "target_language"), "string", lambda random: random.choice("German French Spanish Italian Chinese Dutch Greek Polish".split()), "Target language")),
         ("translate {0} (to|into) {1}", "what is {0} in {1}", "how do you say {0} in {1}", "the {1} word for {0}", "{0} in {1}"),
         lambda random: {"translation": words.made_up(random).lower()}, "In {1} that is {translation}."),
    Tool(("get_price", "stock_price", "price_of", "lookup_price", "quote"), "(Get|Look up) the price of (an article|a product)", (Parameter(("product", "item", "article", "name"), "string", _word, "The product"),),
         ("how much (is|costs) [a|the] {0}", "what does [a|the] {0} cost", "(what is|get|check|tell me) the price of [a|the] {0}", "price of {0}"),
         lambda random: {"price": random.randrange(1, 500), "currency": random.choice(["EUR", "USD"])}, "It costs {price} {currency}."),
    Tool(("turn_on_light", "light_on", "switch_on", "lamp_on", "lights"), "Turn on the light in a room", (Parameter(("room", "where", "place"), "string", lambda random: random.choice(["kitchen", "bedroom", "bathroom", "garage", "hall", "office", "cellar", "living room", "garden", _word(random)]), "The room"),),
         ("(turn|switch) on the (light|lights|lamp) in the {0}", "(turn|switch) the {0} (light|lights) on", "{0} lights on", "light on in the {0}", "it is dark in the {0}"),
         lambda random: {"on": True}, "The light in the {0} is on."),
    Tool(("play_music", "play_song", "music", "play"), "Play (a song|music)", (Parameter(("song", "title", "track", "name"), "string", lambda random: f"{words.made_up(random)} {random.choice(['Song', 'Dance', 'Waltz', 'Blues', 'Night', 'Road'])}", "Title"),),
         ("play {0}", "(play|put on) the song {0}", "i want to hear {0}", "can you play {0}", "start {0}"),
         lambda random: {"playing": True}, "{0} is playing."),
    Tool(("convert_currency", "exchange", "convert_money", "currency"), "Convert an amount of money",
         (Parameter(("amount", "value", "sum"), "integer", _number(1000), "How much"), Parameter(("from", "source", "from_currency"), "string", lambda random: random.choice("EUR USD GBP CHF".split()), "Currency now"), Parameter(("to", "target", "to_currency"), "string", lambda random: random.choice("JPY SEK NOK CAD INR".split()), "Currency wanted")),
         ("(convert|change|exchange) {0} {1} (to|into) {2}", "how much is {0} {1} in {2}", "{0} {1} in {2}", "what are {0} {1} in {2}"),
         lambda random: {"result": random.randrange(1, 9999)}, "{0} {1} are {result} {2}."),
    Tool(("book_table", "reserve_table", "reservation", "book_restaurant"), "(Book|Reserve) a table [in a restaurant]",
         (Parameter(("people", "guests", "persons", "party_size"), "integer", _number(13), "How many people"), Parameter(("time", "at", "when"), "string", _time, "Time as HH:MM")),
         ("(book|reserve|get) a table for {0} [people|persons] at {1}", "[a] table for {0} at {1}", "we are {0} [people] and come at {1}, book a table"),
         lambda random: {"number": random.randrange(1, 40)}, "Table {number} is booked for {0} at {1}."),
    Tool(("get_user", "find_user", "lookup_user", "fetch_customer", "get_customer"), "(Find|Get) (a user|a customer) by number", (Parameter(("id", "user_id", "number", "customer_id"), "integer", _number(100000), "The number"),),
         ("(who is|get|find|show|look up|fetch) (user|customer) {0}", "(get|show me) the (user|customer) with [the] (id|number) {0}", "which (user|customer) has [the] (id|number) {0}"),
         lambda random: {"name": words.name(random), "city": words.city(random)}, "That is {name} from {city}."),
    Tool(("get_distance", "distance", "route_length", "how_far"), "(Get|Return) the distance between two cities",
         (Parameter(("from", "start", "origin", "a"), "string", words.city, "First city"), Parameter(("to", "end", "destination", "b"), "string", words.city, "Second city")),
         ("how far is it from {0} to {1}", "(what is|get|tell me) the distance (between {0} and {1}|from {0} to {1})", "how many kilometres are there between {0} and {1}", "distance {0} {1}"),
         lambda random: {"kilometres": random.randrange(20, 9999)}, "It is {kilometres} km from {0} to {1}."),
    Tool(("roll_dice", "dice", "throw_dice"), "Roll dice", (Parameter(("count", "number", "dice"), "integer", _number(10), "How many dice"),),
         ("(roll|throw) {0} dice", "i need {0} dice rolled", "please (roll|throw) {0} dice for me"),
         lambda random: {"total": random.randrange(1, 60)}, "The total is {total}."),
    Tool(("read_file", "open_file", "cat", "get_file", "show_file"), "(Read|Show) a [text] file", (Parameter(("path", "file", "filename", "name"), "string", lambda random: f"{_word(random)}.{random.choice(['txt', 'md', 'py', 'json', 'log'])}", "Its path"),),
         ("(read|show|open|print) [the file] {0}", "what is in [the file] {0}", "(show|give) me the contents of {0}"),
         lambda random: {"text": f"{words.made_up(random)} {words.made_up(random)} {words.made_up(random)}"}, "The file says: {text}"),
]  # fmt: skip
SYSTEMS = ["You are a helpful assistant.", "Use the tools when they help.", "You can call functions.", ""]


@dataclass(frozen=True)
class Offered:
    """A tool as one dialogue names it."""

    tool: Tool
    name: str
    keys: tuple[str, ...]
    schema: Message

    @classmethod
    def of(cls, tool: Tool, random: Random) -> Offered:
        name = random.choice(tool.names)
        if random.random() < 0.15:
            name = f"{words.made_up(random).lower()}_{random.choice(tool.names)}"
        if random.random() < 0.1:
            name = name.replace("_", random.choice(["-", "."]))
        keys: list[str] = []
        for parameter in tool.parameters:
            key = random.choice([key for key in parameter.names if key not in keys])
            keys.append(f"{key}_{words.made_up(random).lower()}" if random.random() < 0.08 else key)
        properties = {
            key: {"type": parameter.type, **({"description": parameter.words} if random.random() < 0.6 else {})}
            for key, parameter in zip(keys, tool.parameters, strict=True)
        }
        function: Message = {"name": name}
        if random.random() < 0.9:
            function["description"] = sample(tool.description, random) + random.choice(["", "."])
        function["parameters"] = {"type": "object", "properties": properties, "required": list(keys)}
        return cls(tool, name, tuple(keys), {"type": "function", "function": function})

    def call(self, values: list[Any]) -> Message:
        arguments = dict(zip(self.keys, values, strict=True))
        return {"type": "function", "function": {"name": self.name, "arguments": arguments}}


def make(random: Random) -> Exchange:
    tools = [Offered.of(tool, random) for tool in random.sample(TOOLS, random.choice([1, 1, 2, 2, 3, 4]))]
    used = random.choice(tools)
    random.shuffle(tools)
    messages: list[Message] = []
    kind = random.random()
    if kind < 0.14:
        intent = random.choice(list(intents.load().values()))
        messages += [user(typed(intent.question(random), random)), assistant(intent.answer(random))]
    elif kind < 0.22 and len(used.keys) == 1:
        messages += _several(used, random)
    else:
        for offered in [used] if random.random() < 0.8 else random.sample(tools, min(2, len(tools))):
            messages += _one(offered, random)
    return Exchange(messages, system=random.choice(SYSTEMS), tools=[offered.schema for offered in tools])


def _one(offered: Offered, random: Random) -> list[Message]:
    tool = offered.tool
    values = [parameter.value(random) for parameter in tool.parameters]
    question = sample(random.choice(tool.asks), random).format(*values)
    call = {"role": "assistant", "content": "", "tool_calls": [offered.call(values)]}
    messages = [user(typed(question, random, exact=True, bare=random.random() < 0.5)), call]
    if random.random() < 0.75:
        result = tool.result(random)
        content = (
            json.dumps(result)
            if random.random() < 0.8
            else ", ".join(f"{key}: {value}" for key, value in result.items())
        )
        if random.random() < 0.06:
            content, told = json.dumps({"error": "not found"}), "The tool reports an error: not found."
        else:
            told = tool.told.format(*values, **result)
        messages += [{"role": "tool", "content": content}, assistant(told)]
    return messages


def _several(offered: Offered, random: Random) -> list[Message]:
    """One question, two calls."""
    tool = offered.tool
    pair = [tool.parameters[0].value(random) for _ in range(2)]
    question = sample(random.choice(tool.asks), random).format(f"{pair[0]} and {pair[1]}")
    results = [tool.result(random) for _ in pair]
    told = " ".join(tool.told.format(value, **result) for value, result in zip(pair, results, strict=True))
    return [
        user(typed(question, random, exact=True, bare=True)),
        {"role": "assistant", "content": "", "tool_calls": [offered.call([value]) for value in pair]},
        *[{"role": "tool", "content": json.dumps(result)} for result in results],
        assistant(told),
    ]
