"""Questions about single flags, settings and commands, answered from the program's own help."""

from __future__ import annotations

import re
from random import Random

from .. import words
from ..dialogue import Exchange
from ..facts import Command, Facts, Setting
from ..grammar import sample, typed
from ..intents import what_frame
from ..noise import disturb

FLAG = (
    "what does {} do|what is {} [for]|explain {}|how do i use {}|{}|tell me about {}|what is the (flag|option) {} [for]|when do i need {}"
    "|what does the (flag|option) {} (do|mean)|(meaning of|help on|help with|help for) {}|what happens (with|if i give|when i use) {}|can you explain {}"
    "|which command(s|) (has|have|takes|take|knows|know) {}|what about {}|what is {} good for|describe {}|is there a flag {}|where can i use {}"
)
SETTING = (
    "what does (the setting|the option|) {} (do|mean)|what is (the setting|) {} [for]|explain (the setting|) {}|how do i (set|change) {}|tell me about (the setting|) {}"
    "|what is the default (of|for|value of) {}|which environment variable sets {}|{}|what is the environment variable (for|of) {}|(meaning of|help on) {}"
    "|what (value|values) (does|can) {} (have|take)|can i (change|set) {}|where do i set {}|describe (the setting|) {}|what about {}"
)
ENV = "what (is|does) {} [do|for|mean]|explain {}|{}|what does the (environment variable|variable) {} (do|mean)|how do i use {}|tell me about {}"
HAS = "does {command} (have|take|know|support) [a|the] {flag} [flag|option]|can i (use|give) {flag} (with|to) {command}|is there a {flag} for {command}|has {command} [a] {flag}|is {flag} (available|possible|allowed|known|there) (in|with|for) {command}|{command} (with|and) {flag}, (possible|allowed|does that work)|may i (add|pass|give) {flag} to {command}|does {command} (accept|understand|offer|allow) {flag}"
FLAGS = (
    "how (is|would one|does one|do i|should i) {} (invoked|called)|(invocation|synopsis|arguments|parameters|flags|switches) of {}|how does one (invoke|call) {}|"
    "(which|what) (flags|options) (does {} (have|take|know)|are there for {}|can i (give|use with) {})|(list|show) the (flags|options) of {}|(flags|options) of {}"
    "|(what|which) (arguments|parameters) does {} (take|have|know)|how is {} used|(usage|syntax|synopsis) of {}|what is the (usage|syntax) of {}|how do i use {}|show me the usage of {}"
)
DOES = "what does {} do|what is {} [for]|explain {}|tell me about {}|describe {}|{}|what is {} good for|when do i use {}|what happens when i run {}|i do not understand {}|can you explain {}"
UNKNOWN_COMMAND = "what does localllm {} do|how do i use localllm {}|is there a [localllm] command [called] {}|localllm {}|explain [the command] localllm {}|does localllm have a {} command"

SLASH = "what does {} do|what is {} [for]|explain {}|how do i use {}|{}|tell me about {}|what happens when i type {}|meaning of {}|what is {} in the chat"
ABOUT = (SLASH, FLAG, SETTING, ENV, DOES)


def shown(command: Command) -> str:
    return f"`localllm {command.name}`"


def flag_answer(name: str, facts: Facts) -> str:
    """Where a flag belongs and what its help says."""
    owners = [command for command in facts.commands if any(flag.name == name for flag in command.flags)]
    help_text = next(flag.help for flag in owners[0].flags if flag.name == name)
    help_text = re.sub(r" \[default: (.*)\]", r" Default \1.", help_text)
    return f"`{name}` ({', '.join(shown(command) for command in owners)}): {help_text}"


def setting_answer(setting: Setting) -> str:
    return f"`{setting.name}`: {setting.sentence} Default {setting.default}. Environment variable `{setting.env}`."


def usage_answer(command: Command) -> str:
    flags = [f"`{flag.name}`" for flag in command.flags]
    if not flags:
        return f"Usage: `{command.usage}`. It has no flags of its own."
    if len(flags) > 13:
        return f"Usage: `{command.usage}`. Each setting is a flag, such as {', '.join(flags[:4])}; `localllm {command.name} --help` lists them."
    return f"Usage: `{command.usage}`. Flags: {', '.join(flags)}."


def has_answer(command: Command, name: str) -> str:
    if any(flag.name == name for flag in command.flags):
        return f"Yes, {shown(command)} takes `{name}`."
    return f"No, {shown(command)} has no `{name}`. `localllm {command.name} --help` lists its flags."


def make(random: Random, facts: Facts) -> Exchange:
    names = sorted({flag.name for command in facts.commands for flag in command.flags})
    kind = random.choices(
        ["flag", "setting", "env", "has", "usage", "does", "slash", "unknown"], [8, 6, 3, 3, 4, 4, 3, 1]
    )[0]
    if kind == "flag":
        name = random.choice(names)
        asked = name if random.random() < 0.85 else f"the {name[2:]} flag"
        if random.random() < 0.3:
            owner = random.choice([c.name for c in facts.commands if any(flag.name == name for flag in c.flags)])
            asked += random.choice(
                [f" in {owner}", f" in localllm {owner}", f" of {owner}", f" in the help of {owner}"]
            )
        return _exchange(FLAG, asked, flag_answer(name, facts), random)
    if kind == "setting":
        setting = random.choice(facts.settings)
        known = "_" in setting.name or random.random() < 0.3
        asked = random.choice([setting.name, f"`{setting.name}`"]) if known else f"the setting {setting.name}"
        return _exchange(SETTING, asked, setting_answer(setting), random)
    if kind == "env":
        setting = random.choice(facts.settings)
        return _exchange(ENV, setting.env, setting_answer(setting), random)
    if kind == "slash":
        slash = random.choice(facts.slashes)
        return _exchange(
            SLASH,
            slash.name,
            f"`{' '.join((slash.name, slash.arguments)).strip()}` in the chat: {slash.sentence}",
            random,
        )
    command = random.choice(facts.commands)
    form = random.choice(
        [
            f"localllm {command.name}",
            f"`localllm {command.name}`",
            f"the {command.name} command",
            f"the command {command.name}",
        ]
    )
    if kind == "has":
        form = command.name if random.random() < 0.4 else form
        own = [flag.name for flag in command.flags]
        name = random.choice(own) if own and random.random() < 0.5 else random.choice(names)
        if random.random() < 0.1:
            name = f"--{words.made_up(random).lower()}"
        text = sample(HAS, random).replace("{command}", form).replace("{flag}", name)
        return Exchange.of(typed(text, random, exact=True), has_answer(command, name))
    if kind == "usage":
        return _exchange(FLAGS, form, usage_answer(command), random)
    if kind == "does":
        answer = f"{shown(command)}: {command.summary} Usage: `{command.usage}`."
        return _exchange(DOES, form, answer, random)
    word = words.made_up(random).lower()
    if random.random() < 0.5:
        return _exchange(
            FLAG,
            f"--{word}",
            f"I know no flag `--{word}`. `localllm COMMAND --help` lists the flags of a command.",
            random,
        )
    return _exchange(
        UNKNOWN_COMMAND, word, f"I know no command `{word}`. `localllm --help` lists all commands.", random
    )


def _exchange(pattern: str, thing: str, answer: str, random: Random) -> Exchange:
    text = what_frame(thing, random) if pattern in ABOUT and random.random() < 0.5 else sample(pattern, random)
    text = text.replace("{}", thing)
    if random.random() < 0.25:
        text = disturb(text, random)
    return Exchange.of(typed(text, random, exact=True), answer)
