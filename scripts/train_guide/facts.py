"""Facts about the program, read from its code, `--help` and docs by introspection. The answers of guide are made of them.

python -m scripts.train_guide.facts FILE     # write the facts, for a machine without the packages of localllm
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .topics import PARTS, Topic, load

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/develop/*.md")
MAX_SENTENCE = 260  # characters


@dataclass(frozen=True)
class Fact:
    """An answer, and the names and purposes by which a question may ask for it: `F2`, or `delete a model`."""

    answer: str
    names: tuple[str, ...] = ()
    purposes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """`table`: id, such as `command pull`, -> fact. `known`: kind -> names that exist, to recognise invented ones."""

    table: dict[str, Fact]
    known: dict[str, list[str]] = field(default_factory=dict)

    def save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(self), indent=1) + "\n", "utf-8")

    @classmethod
    def load(cls, file: Path) -> Facts:
        data = json.loads(file.read_text("utf-8"))
        table = {
            name: Fact(fact["answer"], tuple(fact["names"]), tuple(fact["purposes"]))
            for name, fact in data["table"].items()
        }
        return cls(table, data["known"])

    def answer(self, topic: Topic) -> str:
        """The answer of a topic: its own text, or its facts one after the other. Empty if the program has none of them."""
        facts = (self.table.get(part) for part in topic.parts)
        return topic.text or " ".join(fact.answer for fact in facts if fact)

    def invented(self, text: str) -> list[str]:
        """Names in the code of a text that the program does not have. A flag must belong to the command before it."""
        return [name for code in re.findall(r"`([^`\n]+)`", text) for name in self._invented(code)]

    def _invented(self, code: str) -> Iterator[str]:
        owner = re.match(r"(?:.*\| *)?localllm((?: [a-z]+)+)", code)
        flags = self.known["flag"]
        if owner:
            name = self._longest(owner[1].strip())
            if name is None:
                yield f"localllm{owner[1]}"
                return
            flags = [
                flag.removeprefix(f"{name} ") for flag in self.known["command flag"] if flag.startswith(f"{name} -")
            ]
        for kind, pattern, names in (
            ("flag", r"(?<![\w-])--[a-z][a-z-]*", [*flags, "--help", "--version"]),
            ("variable", r"\bLOCALLLM_[A-Z_]+\b", self.known["variable"]),
            ("slash", r"^/[a-z]+(?= |$)", self.known["slash"] + self.known["route"]),
            ("route", r"/v1/[a-z_/{}]+", self.known["route"]),
            ("key", r"^(?:F\d+|(?:Ctrl|Alt|Shift)\+\w+)$", self.known["key"]),
        ):
            yield from (name for name in re.findall(pattern, code) if name not in names and kind)

    def _longest(self, words: str) -> str | None:
        """The command at the start of `words`, such as `adapters load` of `adapters load folder`."""
        parts = words.split()
        names = (" ".join(parts[:count]) for count in (2, 1))
        return next((name for name in names if name in self.known["command"]), None)


def collect() -> Facts:
    """The facts about the localllm that can be imported, and its docs."""
    from localllm.app import config
    from localllm.app.developer import Developer

    table: dict[str, Fact] = {}
    commands = dict(_commands())
    pages = {str(file.relative_to(ROOT)): file.read_text("utf-8") for glob in PAGES for file in sorted(ROOT.glob(glob))}
    for facts in (
        _command_facts(commands), _flag_facts(commands), _setting_facts(), _slash_facts(), _key_facts(), _route_facts(),
        _error_facts(), _page_facts(pages), _make_facts(), _backend_facts(pages),
    ):  # fmt: skip
        table.update(facts)
    texts = {name: command.help or "" for name, command in commands.items()} | pages
    for part in sorted({part for topic in load() for part in topic.parts}):
        if part.startswith("quote "):
            table[part] = Fact(_quote(part.removeprefix("quote "), texts, table))
    variables = {setting.env for setting in [*config.describe(), *config.describe(Developer)]}
    variables.update(name for text in pages.values() for name in re.findall(r"LOCALLLM_[A-Z_]+\b", text))
    keys = {
        key
        for name, fact in table.items()
        if name.startswith(("key ", "slash "))
        for key in fact.names
        if key[0] != "/"
    }
    flags = [f"{name} {option}" for name, command in commands.items() for option in _options(command)]
    return Facts(
        table,
        {
            "command": list(commands),
            "command flag": flags,
            "flag": sorted({flag.rpartition(" ")[2] for flag in flags}),
            "variable": sorted(variables),
            "slash": [name for fact, one in table.items() if fact.startswith("slash ") for name in one.names if name[0] == "/"],
            "route": [*_routes(), *(path.replace("{id}", "ID") for path in _routes()), "/v1"],
            "key": sorted(key for key in keys if " " not in key),
            "error": [name.removeprefix("error ") for name in table if name.startswith("error ")],
            "setting": [setting.name for setting in config.describe()],
        },
    )  # fmt: skip


def _commands() -> Iterator[tuple[str, Any]]:
    """The commands and the commands of their groups: `adapters`, `adapters load`."""
    from localllm.app.cli import cli

    groups = [("", cli)]
    for prefix, group in groups:
        for name, command in group.commands.items():
            if command.hidden:
                continue
            yield f"{prefix}{name}", command
            if hasattr(command, "commands"):
                groups.append((f"{prefix}{name} ", command))


def _options(command: Any) -> dict[str, str]:
    """The long flags of a command and their help."""
    import click

    flags = {}
    for option in command.get_params(click.Context(command)):
        long = [form for form in option.opts if form.startswith("--")]
        if option.param_type_name == "option" and not option.hidden and long and "--help" not in long:
            flags[long[0]] = re.sub(r" \[default: .*\]$", "", " ".join((option.help or "").split()))
    return flags


def _usage(name: str, command: Any) -> str:
    import click

    usage = command.get_usage(click.Context(command, info_name=f"localllm {name}")).removeprefix("Usage: ")
    return " ".join(usage.replace("[OPTIONS]", "").replace("[ARGS]...", "").split())


def _purposes(text: str) -> tuple[str, ...]:
    """The clauses of the first sentence of a text, as a question writes them: `delete a chat`."""
    clauses = re.split(r"; |: ", re.split(r"\.(?: |$)| \(", text)[0])
    return tuple(clause if clause[1:2].isupper() else clause[0].lower() + clause[1:] for clause in clauses if clause)


def _paragraphs(command: Any) -> list[str]:
    return [" ".join(part.split()) for part in (command.help or "").replace("\b", "").split("\n\n")]


def _command_facts(commands: dict[str, Any]) -> Iterator[tuple[str, Fact]]:
    for name, command in commands.items():
        summary, *more = _paragraphs(command)
        details = _sentences(more[0])[0] if more and not more[0].startswith("Examples") else ""
        example = re.search(r"^ *(localllm .*?)(?:  +#.*)?$", command.help.partition("Examples:")[2], re.MULTILINE)
        parts = [
            f"`{_usage(name, command)}`: {summary}",
            details,
            f"Example: `{example[1]}`." if example else "",
            f"More: `localllm {name} --help`.",
        ]
        names = (f"localllm {name}", f"`localllm {name}`", f"the command {name}", f"the {name} command")
        yield f"command {name}", Fact(" ".join(filter(None, parts)), names, _purposes(summary)[:1])


def _flag_facts(commands: dict[str, Any]) -> Iterator[tuple[str, Fact]]:
    owners: dict[str, dict[str, list[str]]] = {}  # flag -> help -> commands
    for name, command in commands.items():
        for flag, text in _options(command).items():
            owners.setdefault(flag, {}).setdefault(text, []).append(name)
    for flag, texts in owners.items():
        parts = [f"`{flag}` ({_listed(names)}): {text}" for text, names in texts.items()]
        names = (flag, f"`{flag}`", f"the flag {flag}", f"the option {flag}", f"the {flag} flag")
        yield f"flag {flag}", Fact(" ".join(parts[:3]), names, _purposes(next(iter(texts)))[:1])
    for name, command in commands.items():
        flags = [f"`{flag}`" for flag in _options(command)]
        listed = f"{', '.join(flags[:12]) or 'only `--help`'}{' and others' * (len(flags) > 12)}"
        yield f"flags {name}", Fact(f"Flags of `localllm {name}`: {listed}. More: `localllm {name} --help`.")


def _listed(names: list[str]) -> str:
    shown = [f"`localllm {name}`" for name in names]
    return ", ".join(shown) if len(shown) <= 4 else f"{', '.join(shown[:3])} and {len(shown) - 3} other commands"


def _setting_facts() -> Iterator[tuple[str, Fact]]:
    from localllm.app import config
    from localllm.app.developer import Developer

    for setting in config.describe():
        shown = json.dumps(list(setting.default) if isinstance(setting.default, tuple) else setting.default)
        text = f"Setting `{setting.name}`: {setting.meaning} Default {shown}."
        bare = (setting.name,) if "_" in setting.name else ()  # a bare word such as model asks for another thing
        names = (setting.env, *bare, f"`{setting.name}`", f"the setting {setting.name}")
        yield (
            f"setting {setting.name}",
            Fact(
                f"{text} Change it: `localllm config {setting.name}=VALUE`, or `{setting.env}`.",
                names,
                _purposes(setting.meaning)[:1],
            ),
        )
    for setting in config.describe(Developer):
        yield f"setting {setting.env}", Fact(f"`{setting.env}` is for developers: {setting.meaning}", (setting.env,))


def _slash_facts() -> Iterator[tuple[str, Fact]]:
    from localllm.app.tui.commands import COMMANDS

    for one in COMMANDS:
        key = f"`{one.key}` or " if one.key else ""
        others = f" Also {', '.join(f'`/{alias}`' for alias in one.aliases)}." if one.aliases else ""
        text = f"{key}`{' '.join((f'/{one.name}', one.arguments)).strip()}` in the chat: {one.sentence}{others}"
        keys = (one.key, f"the {one.key} key", f"{one.key} in the chat") if re.match(r"F\d", one.key) else ()
        yield f"slash {one.name}", Fact(text, (*(f"/{name}" for name in one.names), *keys), _purposes(one.sentence)[:1])


def _key_facts() -> Iterator[tuple[str, Fact]]:
    """The tables of the help screen, and the letters of the adapter screen. A key may have uses on several screens."""
    from localllm.app.tui import help as screen
    from localllm.app.tui.adapters import Adapters

    places = {
        "KEYS": "in the chat",
        "MODEL_KEYS": "on the model screen (`F2`)",
        "HISTORY_KEYS": "in the history (`F3`)",
    }
    uses: dict[str, list[tuple[str, str, list[str]]]] = {}  # key -> text, place, purposes
    for table, place in places.items():
        for row, text in getattr(screen, table, ()):
            match = re.fullmatch(r"(  )?(\S+(?:, \S+)*)", row)
            keys = match[2].split(", ") if match else []
            where = "on a message of the chat" if match and match[1] else place
            listed = ", ".join(f"`{key}`" for key in keys)
            clauses = _purposes(text)
            for index, key in enumerate(keys):  # `e, r`: `Edit your message; generate another answer`
                own = clauses[index : index + 1] if len(clauses) == len(keys) else clauses
                suffix = " on a message" if match and match[1] else ""
                purposes = [purpose + suffix for purpose in own]
                uses.setdefault(key, []).append((f"{listed} {where}: {text}.", where.partition(" (")[0], purposes))
    for key, rows in uses.items():
        names = (f"the key {key}", f"the {key} key", f"{key} key", *(f"{key} {where}" for _, where, _ in rows))
        texts = " ".join(text for text, _, _ in rows)
        yield f"key {key}", Fact(texts, (key, *names), tuple(one for _, _, own in rows for one in own))
    bindings = [(one.key.split(",")[0], one.description) for one in Adapters.BINDINGS]
    listed = ", ".join(f"`{key}` {text}" for key, text in bindings)
    yield (
        "key adapters",
        Fact(f"Keys on the adapter screen (`F5`): `Enter` select, {listed}.", ("keys of F5", "the adapter screen")),
    )


def _routes() -> dict[str, tuple[str, str]]:
    """Path -> method and summary."""
    from localllm.app.api.openapi import describe

    return {
        path: next((verb.upper(), one["summary"]) for verb, one in methods.items())
        for path, methods in describe("")["paths"].items()
    }


def _route_facts() -> Iterator[tuple[str, Fact]]:
    for path, (method, summary) in _routes().items():
        yield (
            f"route {path}",
            Fact(
                f"`{method} {path}` of the API: {summary}.",
                (path, f"{method} {path}", f"the route {path}"),
                _purposes(summary)[:1],
            ),
        )


def _error_facts() -> Iterator[tuple[str, Fact]]:
    from localllm.app import cli, errors

    exits = dict(re.findall(r"(\d+) ([a-zA-Z ]+)", cli.cli.epilog or ""))
    for code, kind in errors.BY_CODE.items():
        reason = " ".join((kind.__doc__ or "").split()) if kind is not errors.AppError else ""
        exit_text = exits.get(str(kind.exit_code), "")
        text = f"Error `{code}`: HTTP status {kind.status}, exit code {kind.exit_code}{exit_text and f' ({exit_text.strip()})'}."
        yield f"error {code}", Fact(f"{text} {reason}".strip(), (code, f"`{code}`", f"the error {code}"))


def _page_facts(pages: dict[str, str]) -> Iterator[tuple[str, Fact]]:
    for name, text in pages.items():
        title = text.partition("\n")[0].removeprefix("# ")
        sections = [one for one in re.findall(r"^## (.*)$", text, re.MULTILINE) if len(one) < 25][:5]
        listed = f" Sections: {', '.join(sections)}." if sections else ""
        purposes = (title.lower(), name.removesuffix(".md").rpartition("/")[2].lower())
        yield (
            f"page {name}",
            Fact(f"The page `{name}` ({title}) knows more.{listed}", (name, f"the page {name}"), purposes),
        )


def _make_facts() -> Iterator[tuple[str, Fact]]:
    head = (ROOT / "Makefile").read_text("utf-8").partition("\n\n")[0].replace("\n#    ", " ")
    for target, text in re.findall(r"^# make ([a-z-]+) +(.*)$", head, re.MULTILINE):
        yield (
            f"make {target}",
            Fact(
                f"`make {target}` in a clone: {' '.join(text.split())}.",
                (f"make {target}", f"`make {target}`"),
                _purposes(" ".join(text.split()))[:1],
            ),
        )


def _backend_facts(pages: dict[str, str]) -> Iterator[tuple[str, Fact]]:
    """The devices of the backends and their state, from the table of hardware in the docs."""
    from localllm.backends import ORDER

    for name in ORDER:
        rows = re.findall(rf"^\| ([^|]+) \| `{name}` \| ([^|]+) \|", "\n".join(pages.values()), re.MULTILINE)
        device, state = rows[0] if rows else ("Backend", "see docs/hardware.md")
        text = f"{device}, backend `{name}`: {'not supported' if state == 'no' else state}."
        names = (f"the backend {name}", f"the {name} backend", f"--backend {name}")
        yield f"backend {name}", Fact(f"{text} `localllm doctor` shows what this machine can use.", names)
    yield (
        "backends",
        Fact(f"Backends in the order in which they are tried: {', '.join(ORDER)}. `localllm doctor` shows them."),
    )


def _quote(part: str, texts: dict[str, str], table: dict[str, Fact]) -> str:
    """The first sentence of a help text or a page with all the words; else the name of the text."""
    name, _, words = part.partition(" / ")
    page = f"`{name}`" if name.endswith(".md") else f"`localllm {name} --help`"
    for sentence in _prose(texts.get(name, "")):
        if all(re.search(rf"(?<!\w){re.escape(word)}", sentence, re.IGNORECASE) for word in words.split()):
            return f"{page}: {sentence.rstrip('.')}."
    print(f"warning: no sentence of {page} has the words: {words}", file=sys.stderr)
    return f"{page} knows more." if name in texts else table["page README.md"].answer


def _prose(text: str) -> Iterable[str]:
    """The sentences of the paragraphs and list items of a page, without code, tables and the targets of links."""
    text = re.sub(r"(?s:```.*?```|<!--.*?-->)|(?m:^[|#].*$)|!\[.*?\]\(.*?\)", "\n\n", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("\b", "").replace("**", "")
    text = re.sub(r"(?m)^( *\S.*?\S)  +(\S.*)$", r"\n\n\1: \2\n\n", text)  # a list of names with their meaning
    for paragraph in re.split(r"\n\s*\n|\n(?:[-*]|\d+\.) ", text):
        yield from (one for one in _sentences(" ".join(paragraph.split())) if len(one) <= MAX_SENTENCE)


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?]) +(?=[A-Z`]|--|localllm)", text)


def main() -> None:
    facts = collect()
    facts.save(Path(sys.argv[1]))
    for topic in load():
        missing = [part for part in topic.parts if part.partition(" ")[0] in PARTS and part not in facts.table]
        for name in [*missing, *facts.invented(topic.text)]:
            print(f"warning: topics/{topic.file}: the program has no {name}", file=sys.stderr)


if __name__ == "__main__":
    main()
