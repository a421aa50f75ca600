"""Rewrites the JSON schema of a client so that llguidance enforces the meaning that JSON Schema defines.

The result contains all that it refers to: every reference is `#/$defs/<number>`, also inside another schema. Keywords
that constrain nothing are removed. A keyword that llguidance interprets differently is replaced by an equal form, or
refused by name if there is no equal form.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from itertools import combinations
from typing import Any, NoReturn
from urllib.parse import unquote, urljoin

from . import formats, patterns
from .disjoint import are_disjoint

# Limit of subschemas after the rewrite; each different spelling of a $ref adds a copy of its definition.
MAX_REWRITTEN = 20_000

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
APPLICATORS = ("const", "enum", "allOf", "anyOf", "oneOf", "$ref")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
BOUNDS = {
    "minimum": "minimum",
    "maximum": "maximum",
    "exclusiveMinimum": "minimum",
    "exclusiveMaximum": "maximum",
}

# Keywords of any draft that a grammar cannot express → their values that constrain nothing, which are accepted.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "$dynamicRef": (),
    "$recursiveRef": (),
    "not": (False,),
    "if": (),
    "then": (True, {}),
    "else": (True, {}),
    "contains": (),
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "disallow": ([],),
    "divisibleBy": (),
    "extends": ([], {}),
}

_OLD_DRAFT = re.compile(r"/draft-0[467]/")  # these drafts ignore the keywords beside $ref
_SAFE_FLOAT = 2**53  # llguidance uses double precision, which is exact for integers up to this one
_SAFE_INT = 2**63
_MAX_INT = _SAFE_INT - 1
_MAX_COEFFICIENT = 2**32
_LONGEST_CHAIN = 16  # references followed one after the other
_SMALLEST = 1e-30  # used as the number next to 0: llguidance makes a deep regex of the digits of a smaller one


class SchemaProblem(ValueError):
    """The schema is malformed, or has a keyword that a grammar cannot express; the message has its JSON pointer."""


@dataclass
class SelfContained:
    """A schema and its definitions. `root` refers to them as `#/$defs/<name>`; both may move into another schema."""

    root: dict[str, Any] | bool
    definitions: dict[str, dict[str, Any] | bool]


def rewrite(schema: dict[str, Any]) -> SelfContained:
    """Raises SchemaProblem."""
    return _Rewriter(schema).result


@dataclass
class _Place:
    """A subschema, the base URI of its references, and its JSON pointer for error messages."""

    value: object
    base: str
    pointer: str


@dataclass
class _Index:
    """The targets of references: resources by URI, and subschemas by URI and anchor."""

    old_draft: bool  # the draft ignores the keywords beside $ref
    old_id: bool  # draft 4, where $id is spelled id
    resources: dict[str, _Place] = field(default_factory=dict)
    anchors: dict[tuple[str, str], _Place] = field(default_factory=dict)
    bases: dict[int, str] = field(default_factory=dict)  # base URI by id() of a schema object

    def add(self, place: _Place) -> None:
        schema = place.value
        if not isinstance(schema, dict):
            return
        base = place.base
        name = schema.get("id" if self.old_id else "$id")
        if isinstance(name, str) and not (self.old_draft and "$ref" in schema):
            uri, _, fragment = name.partition("#")
            if uri:
                base = _join(base, uri)
                self.resources.setdefault(base, _Place(schema, base, place.pointer))
            if fragment:  # old drafts write an anchor as $id: "#anchor"
                self.anchors.setdefault((base, fragment), _Place(schema, base, place.pointer))
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := schema.get(keyword), str):
                self.anchors.setdefault((base, anchor), _Place(schema, base, place.pointer))
        self.bases[id(schema)] = base
        for child, pointer in _subschemas(schema, place.pointer):
            self.add(_Place(child, base, pointer))


class _Rewriter:
    def __init__(self, schema: dict[str, Any]) -> None:
        draft = str(schema.get("$schema", ""))
        self._old_draft = bool(_OLD_DRAFT.search(draft))
        self._index = _Index(self._old_draft, old_id="/draft-04/" in draft)
        root = _Place(schema, "", "#")
        self._index.resources[""] = root
        self._index.add(root)
        self._names: dict[tuple[str, str], str] = {}
        self._pending: list[tuple[str, _Place]] = []
        self._nodes = 0
        self._steps: list[_Step] = []
        self._merges = False
        result = SelfContained(self._schema(root), {})
        while self._pending:
            name, place = self._pending.pop()
            result.definitions[name] = self._schema(place)
        self._check_steps()
        self.result = result

    def _schema(self, place: _Place) -> dict[str, Any] | bool:
        self._count(place)
        schema = place.value
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            _refuse(place.pointer, "a schema must be an object or a boolean")
        place = _Place(schema, self._index.bases.get(id(schema), place.base), place.pointer)
        if self._old_draft and "$ref" in schema:
            return {"$ref": self._reference(place)}
        # Keep the simple keywords together: llguidance evaluates each run of keywords between applicators alone, and
        # additionalProperties must be in one run with patternProperties.
        before: dict[str, Any] = {}
        simple: dict[str, Any] = {}
        after: dict[str, Any] = {}
        kinds = self._kinds(place)
        for keyword in schema:
            if keyword in APPLICATORS:
                written = "anyOf" if keyword == "oneOf" and self._is_choice(place) else keyword
                (after if simple else before)[written] = self._applicator(place, keyword)
            elif keyword in UNSUPPORTED:
                self._unsupported(place, keyword)
            elif keyword != "type":
                simple |= self._simple(place, keyword, kinds)
        self._check_object(place)
        simple = _narrow_to_multiples(simple, "number" not in kinds, f"{place.pointer}/multipleOf")
        patterns_of_format = simple.pop("format patterns", ())
        rewritten = before | simple | after
        self._merges |= (
            "allOf" in rewritten
            or (bool(before or after) and len(rewritten) > 1)
            or {"properties", "patternProperties"} <= rewritten.keys()
        )
        if "type" in schema:
            rewritten = {"type": schema["type"]} | rewritten
        if patterns_of_format:
            more = [{"pattern": pattern} for pattern in patterns_of_format]
            rewritten["allOf"] = [*rewritten.get("allOf", ()), *more]
        return rewritten

    def _count(self, place: _Place) -> None:
        self._nodes += 1
        if self._nodes > MAX_REWRITTEN:
            _refuse(place.pointer, f"the schema with its references has more than {MAX_REWRITTEN} subschemas")

    def _kinds(self, place: _Place) -> tuple[str, ...]:
        """The types in the keyword `type`; all types if the schema has none."""
        assert isinstance(place.value, dict)
        named = place.value.get("type", TYPES)
        kinds = (named,) if isinstance(named, str) else named
        if not isinstance(kinds, list | tuple) or not kinds or any(kind not in TYPES for kind in kinds):
            _refuse(f"{place.pointer}/type", f"unknown type: {named!r}; supported: {', '.join(TYPES)}")
        return tuple(kinds)

    def _unsupported(self, place: _Place, keyword: str) -> None:
        assert isinstance(place.value, dict)
        value = place.value[keyword]
        alone = keyword in ("then", "else") and "if" not in place.value
        if not alone and value not in UNSUPPORTED[keyword]:
            _refuse(place.pointer, f'the keyword "{keyword}" is not supported')

    def _applicator(self, place: _Place, keyword: str) -> object:
        assert isinstance(place.value, dict)
        value = place.value[keyword]
        pointer = f"{place.pointer}/{keyword}"
        if keyword == "$ref":
            return self._reference(place)
        if keyword == "const":
            _check_literal(value, pointer)
            return value
        if not isinstance(value, list):
            _refuse(pointer, "must be an array")
        if keyword == "enum":
            for index, literal in enumerate(value):
                _check_literal(literal, f"{pointer}/{index}")
            return value
        return self._list(value, place.base, pointer)

    def _is_choice(self, place: _Place) -> bool:
        """True if oneOf may become anyOf: its options are disjoint, and the schema has no anyOf. llguidance itself does
        not follow references to find disjoint options."""
        assert isinstance(place.value, dict)
        options = place.value["oneOf"]
        if not isinstance(options, list) or "anyOf" in place.value:
            return False
        targets = [
            self._target(_Place(option, place.base, f"{place.pointer}/oneOf/{index}"))
            for index, option in enumerate(options)
        ]
        return all(are_disjoint(one, other) for one, other in combinations(targets, 2))

    def _target(self, place: _Place) -> object:
        """The schema at the end of a chain of references; a value that matches the place also matches this schema."""
        for _ in range(_LONGEST_CHAIN):
            if not isinstance(place.value, dict) or not isinstance(reference := place.value.get("$ref"), str):
                break
            base = self._index.bases.get(id(place.value), place.base)
            place = self._resolve(reference, base, f"{place.pointer}/$ref")
        return place.value

    def _list(self, value: list[object], base: str, pointer: str) -> list[dict[str, Any] | bool]:
        return [self._schema(_Place(child, base, f"{pointer}/{index}")) for index, child in enumerate(value)]

    def _simple(self, place: _Place, keyword: str, kinds: tuple[str, ...]) -> dict[str, Any]:
        """What a keyword becomes; empty for one that constrains nothing."""
        assert isinstance(place.value, dict)
        schema, value, pointer = place.value, place.value[keyword], f"{place.pointer}/{_escape(keyword)}"
        if keyword in BOUNDS:
            if not {"integer", "number"} & {*kinds}:
                return {}
            return _bound(schema, BOUNDS[keyword], "number" in kinds, place.pointer)
        if keyword in COUNTS:
            return {keyword: _whole(value, pointer)}
        match keyword:
            case "multipleOf":
                self._steps.append(_step(value, pointer))
                return {keyword: value}
            case "pattern":
                return {keyword: _pattern(value, pointer)}
            case "format" if "string" in kinds:
                return _format(value, pointer)
            case "required":
                if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                    _refuse(pointer, "must be an array of names")
                return {keyword: value}
            case "properties" | "patternProperties":
                if not isinstance(value, dict):
                    _refuse(pointer, "must be an object")
                named = {
                    name: self._schema(_Place(each, place.base, f"{pointer}/{_escape(name)}"))
                    for name, each in value.items()
                }
                if keyword == "patternProperties":
                    named = {_pattern(name, f"{pointer}/{_escape(name)}"): each for name, each in named.items()}
                return {keyword: named}
            case "prefixItems":
                if not isinstance(value, list):
                    _refuse(pointer, "must be an array")
                return {keyword: self._list(value, place.base, pointer)}
            case "items" if isinstance(value, list):  # as older drafts say prefixItems
                return {"prefixItems": self._list(value, place.base, pointer)}
            case "additionalItems":  # beside an array only, as older drafts say items
                if not isinstance(schema.get("items"), list):
                    return {}
                return {"items": self._schema(_Place(value, place.base, pointer))}
            case "items" | "additionalProperties":
                return {keyword: self._schema(_Place(value, place.base, pointer))}
        return {}

    def _check_object(self, place: _Place) -> None:
        """Raises if minProperties needs more than one optional property: a grammar cannot count distinct names."""
        assert isinstance(place.value, dict)
        least = place.value.get("minProperties", 0)
        if isinstance(least, int | float) and least > len(set(place.value.get("required", ()))) + 1:
            _refuse(
                f"{place.pointer}/minProperties",
                f"{least} properties cannot be enforced if more than one is not in required: "
                "a model may write the same name twice",
            )

    def _check_steps(self) -> None:
        """Raises if the product of two multipleOf exceeds 32 bits: llguidance overflows when it merges the schemas."""
        if not self._merges:
            return
        digits = max((step.digits for step in self._steps), default=0)
        coefficients = [step.coefficient * 10 ** (digits - step.digits) for step in self._steps]
        for coefficient, step in zip(coefficients, self._steps, strict=True):
            if coefficient * max(coefficients) >= _MAX_COEFFICIENT:
                _refuse(step.pointer, "too large to be combined with other values; use multipleOf below 65536")

    def _reference(self, place: _Place) -> str:
        assert isinstance(place.value, dict)
        reference = place.value["$ref"]
        pointer = f"{place.pointer}/$ref"
        if not isinstance(reference, str):
            _refuse(pointer, "must be a string")
        target = self._resolve(reference, place.base, pointer)
        name = self._names.get((target.base, target.pointer))
        if name is None:
            name = self._names[target.base, target.pointer] = str(len(self._names))
            self._pending.append((name, target))
        return f"#/$defs/{name}"

    def _resolve(self, reference: str, base: str, pointer: str) -> _Place:
        address, _, fragment = reference.partition("#")
        uri = _join(base, address) if address else base
        resource = self._index.resources.get(uri)
        if resource is None:
            _refuse(pointer, f"{reference[:200]!r} is outside the schema; remote schemas are not loaded")
        fragment = unquote(fragment, errors="replace")
        if fragment and not fragment.startswith("/"):
            anchor = self._index.anchors.get((uri, fragment))
            if anchor is None:
                _refuse(pointer, f"{reference[:200]!r} is an unknown anchor")
            return anchor
        place = resource
        for part in fragment.split("/")[1:]:
            place = self._step_into(place, part.replace("~1", "/").replace("~0", "~"), reference, pointer)
        return place

    def _step_into(self, place: _Place, name: str, reference: str, pointer: str) -> _Place:
        value = place.value
        if isinstance(value, dict) and name in value:
            child = value[name]
        elif isinstance(value, list) and re.fullmatch("0|[1-9][0-9]{0,8}", name) and int(name) < len(value):
            child = value[int(name)]
        else:
            _refuse(pointer, f"{reference[:200]!r} is an unknown path: {place.pointer} has no {name[:80]!r}")
        return _Place(child, place.base, f"{place.pointer}/{_escape(name)}")


def _refuse(pointer: str, problem: str) -> NoReturn:
    raise SchemaProblem(f"{pointer}: {problem}")


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _join(base: str, reference: str) -> str:
    return urljoin(base, reference) or reference


def _subschemas(schema: dict[str, Any], pointer: str) -> Iterator[tuple[object, str]]:
    """The direct subschemas and their pointers; the values of `enum` and `const` are no schemas."""
    for keyword in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(children := schema.get(keyword), dict):
            for name, child in children.items():
                yield child, f"{pointer}/{keyword}/{_escape(name)}"
    for keyword in ("allOf", "anyOf", "oneOf", "prefixItems", "items"):
        if isinstance(children := schema.get(keyword), list):
            for index, child in enumerate(children):
                yield child, f"{pointer}/{keyword}/{index}"
    for keyword in ("items", "additionalItems", "additionalProperties"):
        if isinstance(child := schema.get(keyword), dict):
            yield child, f"{pointer}/{keyword}"


def _check_literal(value: object, pointer: str) -> None:
    """Raises for a value of const or enum that the grammar cannot write, or would write as another value."""
    if isinstance(value, str):
        if unwritable := re.search("[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]", value):
            _refuse(pointer, f"the character U+{ord(unwritable[0]):04X} cannot be encoded")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        _check_exact(value, pointer)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_literal(item, f"{pointer}/{index}")
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_literal(item, f"{pointer}/{_escape(name)}")


def _number(value: object, pointer: str) -> int | float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or (isinstance(value, float) and not math.isfinite(value)):
        _refuse(pointer, "must be a number")
    assert isinstance(value, int | float)
    return value


def _check_exact(value: object, pointer: str, *, limit: int = _SAFE_INT) -> int | float:
    """The number. Raises if double precision cannot represent it, or if its absolute value is `limit` or more."""
    number = _number(value, pointer)
    if abs(number) >= limit or float(number) != number or _parsed(float(number)) != number:
        _refuse(pointer, f"the number cannot be enforced exactly; the limit is {_SAFE_FLOAT} (2^53)")
    return number


def _bound(schema: dict[str, Any], side: str, fractions: bool, pointer: str) -> dict[str, Any]:
    """The bound of one side ("minimum" or "maximum"), from its inclusive and its exclusive keyword.

    `fractions`: the schema also allows numbers that are not integers. An exclusive bound becomes inclusive,
    except a negative minimum or positive maximum of such a schema: llguidance accepts 0 as a number greater than 0.
    """
    outwards, tighter = (-1, max) if side == "minimum" else (1, min)
    exclusive = "exclusive" + side.capitalize()
    bounds: dict[str, int | float] = {}
    if side in schema and schema[side] == _MAX_INT and side == "maximum" and not fractions:
        bounds[side] = _MAX_INT  # llguidance reads it as 2^63, which means no limit for integers
    elif side in schema:
        number = _check_exact(schema[side], f"{pointer}/{side}")
        bounds[side] = number if fractions else _whole_within(number, outwards)
    limit = schema.get(exclusive)
    if limit is True and bounds:  # draft 4: true makes the inclusive keyword exclusive
        limit = schema[side]
    if limit is None or isinstance(limit, bool):
        return bounds
    number = _check_exact(limit, f"{pointer}/{exclusive}", limit=_SAFE_FLOAT)
    if fractions and number * outwards > 0:
        return bounds | {exclusive: number}
    if fractions:
        within: int | float = _neighbour(number, -outwards)
    else:
        whole = _whole_within(number, outwards)
        within = whole - outwards if whole == number else whole
    return {side: tighter(within, bounds.get(side, within))}


def _neighbour(number: float, direction: int) -> float:
    """The next number of double precision, up (1) or down (-1), that llguidance parses without a change."""
    if not number:
        return direction * _SMALLEST
    neighbour = math.nextafter(number, direction * math.inf)
    while _parsed(neighbour) != neighbour:
        neighbour = math.nextafter(neighbour, direction * math.inf)
    return neighbour


def _parsed(number: float) -> float:
    """The number as llguidance parses it: it rounds twice, so the result may differ from the text."""
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    assert isinstance(exponent, int)
    whole = float(int("".join(map(str, digits))))
    return math.copysign(whole * float(f"1e{exponent}") if exponent > 0 else whole / float(f"1e{-exponent}"), number)


def _whole_within(number: float, outwards: int) -> int:
    return math.ceil(number) if outwards < 0 else math.floor(number)


def _whole(value: object, pointer: str) -> int:
    number = _number(value, pointer)
    if number < 0 or number != int(number):
        _refuse(pointer, "must be an integer, 0 or more")
    return int(number)


@dataclass
class _Step:
    """A multipleOf as llguidance stores it: `coefficient` / 10 ** `digits`."""

    coefficient: int
    digits: int
    pointer: str


def _step(value: object, pointer: str) -> _Step:
    """Raises if llguidance would round the value."""
    number = _number(value, pointer)
    if number <= 0:
        _refuse(pointer, "must be greater than 0")
    if number >= _MAX_COEFFICIENT:
        _refuse(pointer, "must be less than 2^32")
    scaled = float(number)
    digits = 0
    while scaled != int(scaled):
        scaled *= 10
        digits += 1
    if scaled >= _MAX_COEFFICIENT or Fraction(int(scaled), 10**digits) != Fraction(str(number)):
        _refuse(pointer, f"{number} cannot be enforced exactly: it has too many digits")
    return _Step(int(scaled), digits, pointer)


def _narrow_to_multiples(simple: dict[str, Any], whole: bool, pointer: str) -> dict[str, Any]:
    """Move the bounds of a multipleOf to its first and last multiple between them. `whole`: integers only.

    Near a bound, llguidance writes all digits of the bound, so a bound must not have more digits than the multiples. It
    also searches a multiple between the bounds in double precision; raises if rounding hides the multiples.
    """
    bounds = simple.keys() & BOUNDS.keys()
    if "multipleOf" not in simple or not bounds:
        return simple
    step = Fraction(str(simple["multipleOf"]))
    if whole:
        step = Fraction(math.lcm(step.numerator, step.denominator), step.denominator)
    outermost: dict[str, Fraction] = {}
    for keyword in bounds:
        count = Fraction(str(simple[keyword])) / step
        if BOUNDS[keyword] == "minimum":
            multiple = (math.floor(count) + 1 if keyword != "minimum" else math.ceil(count)) * step
            outermost["minimum"] = max(multiple, outermost.get("minimum", multiple))
        else:
            multiple = (math.ceil(count) - 1 if keyword != "maximum" else math.floor(count)) * step
            outermost["maximum"] = min(multiple, outermost.get("maximum", multiple))
    narrowed = {keyword: value for keyword, value in simple.items() if keyword not in BOUNDS}
    for side, multiple in outermost.items():
        number = int(multiple) if multiple.denominator == 1 else float(multiple)
        if Fraction(str(number)) != multiple:
            _refuse(pointer, "multipleOf next to a bound has too many digits")
        narrowed[side] = _check_exact(number, pointer)
    if len(outermost) == 2 and outermost["minimum"] <= outermost["maximum"]:
        rough = float(simple["multipleOf"])
        first, last = (float(narrowed[side]) / rough for side in ("minimum", "maximum"))
        if math.ceil(first) * rough > math.floor(last) * rough:
            _refuse(pointer, "multipleOf has multiples between the bounds that cannot be generated")
    return narrowed


def _pattern(value: object, pointer: str) -> str:
    if not isinstance(value, str):
        _refuse(pointer, "must be a string")
    try:
        return patterns.translate(value)
    except patterns.PatternProblem as error:
        _refuse(pointer, str(error))


def _format(value: object, pointer: str) -> dict[str, Any]:
    known = formats.BUILT_IN | formats.PATTERNS.keys()
    if not isinstance(value, str) or value not in known:
        _refuse(pointer, f"unknown format: {str(value)[:80]}; supported: {', '.join(sorted(known))}")
    if value in formats.BUILT_IN:
        return {"format": value}
    return {"format patterns": tuple(map(patterns.translate, formats.PATTERNS[value]))}
