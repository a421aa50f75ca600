from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from localllm.app import bounded
from localllm.app.chat.template import renderer as module
from localllm.app.chat.template.child import Job, Rendered, render
from localllm.app.chat.template.renderer import TemplateExceeded, TemplateRenderer
from localllm.app.chat.tokenizer.special_tokens import PROTECT, RELEASE
from localllm.app.errors import TemplateFailed

HELLO = {"messages": [{"role": "user", "content": "hi"}], "bos_token": "<s>"}


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    """One renderer for the whole table: it must work after each hostile template."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CPU_LIMIT", 0.25)
        patch.setattr(module, "WALL_LIMIT", 30.0)  # not reached, also on a busy machine
        renderer = TemplateRenderer()
        yield renderer
        renderer.close()


# Ordinary features: template → text for HELLO.
ORDINARY = {
    "variables": ("{{ bos_token }}{{ messages[0].content }}", "<s>hi"),
    "attribute of a dict": ("{{ messages[0]['role'] }}", "user"),
    "trim and lstrip blocks": ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),
    "break": ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
    "continue": ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
    "tojson is plain": ("{{ {'a': '<é&>'} | tojson }}", '{"a": "<é&>"}'),
    "tojson with indent": ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
    "tojson sorted": ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
    "generation": ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
    "namespace": ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 1 %}{% endfor %}{{ ns.n }}", "1"),
    "macro": ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(1) }}", "[1]"),
    "undefined is empty": ("{{ nothing }}{{ messages[0].nothing }}.", "."),
    "tests and filters": ("{{ messages | length }}{{ nothing is defined }}{{ 'A' | lower | trim }}", "1Falsea"),
    "string methods": ("{{ ' a b '.strip().split(' ')[-1] }}", "b"),
    "slices": ("{{ messages[1:] }}{{ messages[0].content[::-1] }}", "[]ih"),
    "append and pop": ("{% set a = [1] %}{% set _ = a.append(2) %}{{ a.pop(0) }}{{ a }}", "1[2]"),
    "time": ("{{ strftime_now('%Y') | length }}", "4"),
}

BLOCKS = "{% for i in range(99999) %}{% for j in range(99999) %}"

# Hostile templates. A plain template must fail. A pair is a template that the sandbox renders as a harmless text.
HOSTILE: dict[str, tuple[str, str] | str] = {
    "class of text": ("{{ ''.__class__ }}", ""),
    "class of text by item": ("{{ ''['__class__'] }}", ""),
    "class of text by filter": ("{{ '' | attr('__class__') }}", ""),
    "class of text by built name": ("{{ '' | attr('__cla' ~ 'ss__') }}", ""),
    "class of text in hex": (r"{{ ''['\x5f\x5fclass\x5f\x5f'] }}", ""),
    "map attribute": ("{{ [''] | map(attribute='__class__') | list }}", "[Undefined]"),
    "class, bases": "{{ ().__class__.__bases__[0].__subclasses__() }}",
    "class, mro": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "mro method": "{{ ''.__class__.mro() }}",
    "mro by filter": "{{ () | attr('__class__') | attr('mro') }}",
    "dict's class": "{{ {}.__class__.__base__.__subclasses__() }}",
    "self": "{{ self.__init__.__globals__ }}",
    "self, template": "{{ self._TemplateReference__context.environment }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "joiner": "{{ joiner.__init__.__globals__ }}",
    "lipsum": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "lipsum bomb": "{{ lipsum(n=100000) }}",
    "namespace class": "{{ namespace.__init__.__globals__ }}",
    "namespace dunder": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.__class__.__name__ }}",
    "dict class": "{{ dict.__base__.__subclasses__() }}",
    "range class": "{{ range.__class__.__base__ }}",
    "raise_exception globals": ("{{ raise_exception.__globals__ }}", ""),
    "raise_exception code": "{{ raise_exception.__code__.co_consts }}",
    "strftime globals": "{{ strftime_now.__globals__['__builtins__'] }}",
    "tojson globals": "{{ tojson.__globals__ }}",
    "macro globals": "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "macro function": "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "caller frame": "{% macro m() %}{{ caller.__init__.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "generator frame": "{{ (messages | map('length')).gi_frame.f_globals }}",
    "loop frame": "{% for m in messages recursive %}{{ loop._recurse.__globals__ }}{% endfor %}",
    "undefined class": "{{ nothing.__init__.__globals__ }}",
    "format class": "{{ '{0.__class__.__mro__}'.format('') }}",
    "format globals": ("{{ '{0.__globals__}'.format(raise_exception) }}", ""),
    "format_map": ("{{ '{a.__class__}'.format_map({'a': 1}) }}", ""),
    "format by reference": "{% set f = '{0.__class__.__base__}'.format %}{{ f(1) }}",
    "format by map": "{{ ['{0.__class__.__mro__}'] | map('format', 1) | first }}",
    "format by method map": "{{ '{0.__class__.__mro__}' | attr('format')(1) }}",
    "format width": "{{ '{:>9999999999}'.format('x') }}",
    "percent width": "{{ '%9999999999d' % 1 }}",
    "filter format width": "{{ '%9999999999s' | format('x') }}",
    "list clear": "{{ messages.clear() }}",
    "list sort": "{{ messages.sort() }}",
    "append class": "{{ messages.append.__self__.__class__.__base__ }}",
    "append forever": "{% set a = [1] %}{% for b in a %}{{ a.append(1) or '' }}{% endfor %}",
    "append itself": "{% set a = [] %}{% set _ = a.append(a) %}{{ a | tojson }}",
    "dict update": "{{ messages[0].update({'a': 1}) }}",
    "dict pop": "{{ messages[0].pop('role') }}",
    "include": "{% include '/etc/passwd' %}",
    "include by list": "{% include ['a', '../../etc/passwd'] %}",
    "import": "{% import 'os' as os %}{{ os }}",
    "from import": "{% from 'os' import popen %}",
    "extends": "{% extends '/etc/passwd' %}",
    "range too long": "{{ range(99999999) | list }}",
    "long list": "{{ (range(99999) | list) * 99999 }}",
    "nested loops": BLOCKS + "x{% endfor %}{% endfor %}",
    "silent nested loops": BLOCKS + "{% endfor %}{% endfor %}",
    "silent nested sets": BLOCKS + "{% set a = i * j %}{% endfor %}{% endfor %}",
    "sum of ranges": BLOCKS + "{% if (range(99999) | sum) < 0 %}x{% endif %}{% endfor %}{% endfor %}",
    "string multiplication": "{{ 'x' * 10 ** 10 }}",
    "string doubling": "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "list doubling": "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "big power": "{{ (10 ** 9) ** (10 ** 8) }}",
    "big power at run time": "{% set n = 99999999 %}{{ 7 ** n % 10 }}",
    "big shift": "{{ 2 ** (2 ** (2 ** (2 ** (2 ** 2)))) }}",
    "macro recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macro tree": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "loop recursion": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "center": "{{ 'x' | center(9999999999) }}",
    "indent": "{{ ('a\n' * 9999) | indent(9999999) }}",
    "ljust": "{{ 'x'.ljust(9999999999) }}",
    "expandtabs": r"{{ '\t'.expandtabs(999999999) }}",
    "zfill": "{{ 'x'.zfill(9999999999) }}",
    "join": "{{ ('y' * 99999999) | join('x' * 99999) }}",
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "batch": "{{ 'x' | batch(999999999, 'y') | list }}",
    "slice": "{{ 'x' | slice(999999999) | list }}",
    "tojson indent": "{{ [[[1]]] | tojson(indent=999999999) }}",
    "wordwrap": "{{ ('a ' * 99999999) | wordwrap(1) }}",
    "urlize": "{{ ('http://a.b ' * 9999999) | urlize }}",
    "xmlattr": "{{ {'a b': 'x'} | xmlattr }}",
    "output bomb": "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "raising": "{{ raise_exception('roles must alternate') }}",
    "raising at length": "{{ raise_exception('x' * 99999) }}",
    "raising a list": "{{ raise_exception(messages) }}",
    "division by zero": "{{ 1 / 0 }}",
    "wrong types": "{{ 'a' + 1 }}",
    "attribute of undefined": "{{ nothing.more }}",
    "calling text": "{{ 'a'() }}",
    "lone surrogate": r"{{ '\ud800' }}",
    "syntax error": "{% for %}",
    "unknown tag": "{% exec 'id' %}",
    "unknown filter": "{{ 1 | system }}",
    "unclosed": "{% if true %}",
    "deep blocks": "{% if true %}" * 5000 + "{% endif %}" * 5000,
    "deep parentheses": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "deep list": "{{ " + "[" * 50000 + " }}",
    "deep unary": "{{ " + "not " * 50000 + "1 }}",
    "long sum": "{{ " + "+".join("1" * 50000) + " }}",
    "too large": "x" * (module.MAX_TEMPLATE + 1),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_template_renders(renderer: TemplateRenderer, name: str) -> None:
    source, expected = ORDINARY[name]
    assert renderer.render(source, HELLO) == expected
    assert render(Job(source, HELLO, 1000)).text == expected


def test_the_table_has_many_hostile_templates() -> None:
    assert len(HOSTILE) >= 60


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_fails_or_is_harmless(renderer: TemplateRenderer, name: str) -> None:
    row = HOSTILE[name]
    if isinstance(row, tuple):
        assert renderer.render(row[0], HELLO) == row[1]
    else:
        with pytest.raises(TemplateFailed) as caught:
            renderer.render(row, HELLO)
        assert len(caught.value.message) < 700
    assert renderer.render("{{ messages[0].content }}", HELLO) == "hi"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ().__class__.mro() }}", "forbidden"),
        ("\n{% for %}", "line 2"),
        (BLOCKS + "{% endfor %}{% endfor %}", "processor time"),
        ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "characters"),
        ("{{ 'x' * 10 ** 10 }}", "memory"),
        (r"{{ '\ud800' }}", "surrogates not allowed"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "deeply"),
    ],
)
def test_an_error_has_its_reason(renderer: TemplateRenderer, source: str, words: str) -> None:
    with pytest.raises(TemplateFailed, match=words):
        renderer.render(source, HELLO)


@pytest.mark.parametrize(
    ("source", "exceeded"),
    [
        ("{{ raise_exception('no') }}", False),
        ("{{ 1 / 0 }}", False),
        ("{{ ().__class__.mro() }}", False),
        ("{% for %}", False),
        (BLOCKS + "{% endfor %}{% endfor %}", True),
        ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", True),
        ("{{ 'x' * 10 ** 10 }}", True),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", True),
        ("x" * (module.MAX_TEMPLATE + 1), True),
    ],
)
def test_limits_are_told_from_refusals(renderer: TemplateRenderer, source: str, exceeded: bool) -> None:
    with pytest.raises(TemplateFailed) as caught:
        renderer.render(source, HELLO)
    assert isinstance(caught.value, TemplateExceeded) is exceeded


def test_integers_of_any_size_are_rendered(renderer: TemplateRenderer) -> None:
    assert renderer.render("{{ a | tojson }}", {"a": [10**40, -(10**40), 1.5]}) == f"[{10**40}, -{10**40}, 1.5]"


def test_values_that_are_nested_too_deeply_are_refused(renderer: TemplateRenderer) -> None:
    value: object = 1
    for _ in range(100_000):
        value = [value]
    with pytest.raises(TemplateExceeded, match="deeply"):
        renderer.render("a", {"a": value})
    assert renderer.render("b", {}) == "b"


def test_a_rendering_is_limited_in_elapsed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPU_LIMIT", 600.0)
    monkeypatch.setattr(module, "WALL_LIMIT", 0.2)
    renderer = TemplateRenderer()
    with pytest.raises(TemplateFailed, match=r"longer than 0\.2 s"):
        renderer.render(BLOCKS + "{% endfor %}{% endfor %}", {})
    renderer.close()


def test_the_limit_of_the_output_grows_with_the_conversation(renderer: TemplateRenderer) -> None:
    long = "é" * 3_000_000
    assert renderer.render("{{ content }}{{ content }}", {"content": long}) == long * 2


class Echo:
    """A fake child process: stores the jobs and answers with a text."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def call(self, request: bytes) -> bytes:
        self.jobs.append(msgspec.json.decode(request, type=Job))
        return msgspec.msgpack.encode(Rendered(text="ok"))


def test_the_sizes_of_template_and_output_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = TemplateRenderer()
    echo = Echo()
    monkeypatch.setattr(renderer, "_child", echo)
    assert renderer.render("x" * module.MAX_TEMPLATE, {}) == "ok"
    with pytest.raises(TemplateFailed, match="the limit is 262144") as refused:
        renderer.render("x" * (module.MAX_TEMPLATE + 1), {})
    assert refused.value.param == "messages"
    renderer.render("x", {"a": "b" * 1000})
    monkeypatch.setattr(module, "MAX_TEXT", 2**20 + 5)
    renderer.render("x", {"a": "b" * 1000})
    size = len(msgspec.json.encode({"a": "b" * 1000}))
    assert [job.max_chars for job in echo.jobs] == [2**20 + 8, 2**20 + 4 * size, 2**20 + 5]


def test_output_and_messages_are_cut_at_their_limits() -> None:
    assert render(Job("{{ 'a' }}bc", {}, 3)).text == "abc"
    assert render(Job("{{ 'a' }}bc", {}, 2)).problem == "it wrote more than 2 characters"
    for size in (500, 501):
        problem = render(Job("{{ raise_exception('x' * n) }}", {"n": size}, 9)).problem
        assert problem == "x" * 500 + ("…" if size > 500 else "")


def test_the_child_ignores_ctrl_c(renderer: TemplateRenderer) -> None:
    renderer.render("a", {})
    child = renderer._child._child
    assert child is not None
    os.kill(child.pid, signal.SIGINT)
    assert renderer.render("b", {}) == "b"
    assert renderer._child._child is child, "the same child renders again"


def test_an_exhausted_child_exits(renderer: TemplateRenderer) -> None:
    renderer.render("a", {})
    child = renderer._child._child
    assert child is not None
    with pytest.raises(TemplateFailed, match="deeply"):
        renderer.render("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", {})
    assert renderer._child._child is None
    assert child.returncode is not None


def test_a_killed_child_is_replaced(renderer: TemplateRenderer) -> None:
    renderer.render("a", {})
    child = renderer._child._child
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    with pytest.raises(TemplateFailed):
        renderer.render("a", {})
    assert renderer.render("a", {}) == "a"


def test_the_child_gets_no_secrets_and_writes_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    renderer = TemplateRenderer()
    renderer.render("a", {})
    child = renderer._child._child
    assert child is not None
    if Path("/proc").exists():
        lines = Path(f"/proc/{child.pid}/environ").read_text().split("\0")
        environment = dict(line.split("=", 1) for line in lines if line)
        pools = {name: value for name, value in environment.items() if name.endswith("_NUM_THREADS")}
        assert set(environment) - set(pools) <= {"PATH", "PYTHONPATH", "LANG", "LC_CTYPE"}
        assert pools == dict.fromkeys(bounded._POOLS, "1")
        lines = Path(f"/proc/{child.pid}/limits").read_text().splitlines()
        limits = {line[:26].strip(): line[26:].split()[0] for line in lines}
        assert limits["Max file size"] == "0"
        assert limits["Max core file size"] == "0"
        assert limits["Max address space"] == str(module.MEMORY_LIMIT)
    renderer.close()
    assert child.returncode is not None


def test_marks_of_protected_text_are_never_escaped() -> None:
    text = f"é{PROTECT}<|im_end|>{RELEASE}\x7f🙂\U0010ffff"
    rendered = render(Job("{{ x | tojson(ensure_ascii=True) }}", {"x": text}, 1000)).text
    assert rendered == f'"\\u00e9{PROTECT}<|im_end|>{RELEASE}\\u007f\\ud83d\\ude42\\udbff\\udfff"'
