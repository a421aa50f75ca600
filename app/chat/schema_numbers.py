"""Checks the numbers of a JSON schema, and changes them so that llguidance enforces the same numbers.

llguidance uses double precision, so it rounds numbers with many digits. It overflows if the product of two `multipleOf`
exceeds 32 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from .schema_place import Place

_SAFE_FLOAT = 2**53  # double precision is exact for integers up to this one
_SAFE_INT = 2**63
_MAX_INT = _SAFE_INT - 1
_MAX_COEFFICIENT = 2**32
_SMALLEST = 1e-30  # inclusive bound for an exclusive 0; a smaller number has many digits: a deep regex

Number = int | float


@dataclass(frozen=True)
class Side:
    """One side of a range of numbers, and how to round a bound to an integer inside the range."""

    inclusive: str  # keyword of the inclusive bound
    exclusive: str  # keyword of the exclusive bound
    outwards: int  # direction out of the range: -1 or 1
    tighter: Callable[..., Any]  # selects the tighter of two bounds
    round: Callable[[Any], int]  # computes the outermost integer that an inclusive bound allows
    round_exclusive: Callable[[Any], int]  # computes the outermost integer that an exclusive bound allows


_LOWER = Side("minimum", "exclusiveMinimum", -1, max, math.ceil, lambda bound: math.floor(bound) + 1)
_UPPER = Side("maximum", "exclusiveMaximum", 1, min, math.floor, lambda bound: math.ceil(bound) - 1)
SIDES = {keyword: side for side in (_LOWER, _UPPER) for keyword in (side.inclusive, side.exclusive)}


def number(place: Place) -> Number:
    """The number at a place. Raises SchemaProblem if the value is not a finite number."""
    value = place.value
    place.require(type(value) in (int, float) and abs(value) < math.inf, "must be a number")
    return value  # type: ignore[no-any-return]


def size(place: Place) -> int:
    """The integer at a place. Raises SchemaProblem if the value is negative or has a fraction."""
    value = number(place)
    place.require(value >= 0 and value == int(value), "must be an integer, 0 or more")
    return int(value)


def exact(place: Place, *, limit: int = _SAFE_INT) -> Number:
    """The number at a place. Raises SchemaProblem if double precision cannot represent it, or if its absolute value is
    `limit` or more."""
    value = number(place)
    is_exact = abs(value) < limit and float(value) == value == _parsed(float(value))
    place.require(is_exact, f"the number cannot be enforced exactly; the limit is {_SAFE_FLOAT} (2^53)")
    return value


def bound(schema: Place, side: Side, *, fractions: bool) -> dict[str, Number]:
    """The bound of one side of a schema, from its inclusive and its exclusive keyword.

    `fractions`: the schema also allows numbers that are not integers; then a negative minimum and a positive maximum
    stay exclusive. Any other exclusive bound becomes inclusive: llguidance accepts 0 as a number greater than 0.
    Raises SchemaProblem.
    """
    bounds: dict[str, Number] = {}
    if schema.has(side.inclusive):
        bounds[side.inclusive] = _inclusive(schema.child(side.inclusive), side, fractions)
    limit = schema.value.get(side.exclusive)
    if limit is True:  # draft 4: true makes the inclusive keyword exclusive
        limit = schema.value.get(side.inclusive)
    if limit is None or limit is False:
        return bounds
    value = exact(Place(limit, "", f"{schema.pointer}/{side.exclusive}"), limit=_SAFE_FLOAT)
    if not fractions:
        inside: Number = side.round_exclusive(value)
    elif value * side.outwards > 0:
        return bounds | {side.exclusive: value}
    else:
        inside = _neighbour(value, -side.outwards)
    return {side.inclusive: side.tighter(inside, bounds.get(side.inclusive, inside))}


def _inclusive(place: Place, side: Side, fractions: bool) -> Number:
    if place.value == _MAX_INT and side is _UPPER and not fractions:
        return _MAX_INT  # llguidance reads it as 2^63, which means no limit for integers
    value = exact(place)
    return value if fractions else side.round(value)


def _neighbour(value: float, direction: int) -> float:
    """The nearest double above (`direction` 1) or below (-1) the value that llguidance parses without a change."""
    if not value:
        return direction * _SMALLEST
    neighbour = math.nextafter(value, direction * math.inf)
    while _parsed(neighbour) != neighbour:
        neighbour = math.nextafter(neighbour, direction * math.inf)
    return neighbour


def _parsed(value: float) -> float:
    """The number that llguidance parses from the text of `value`: llguidance rounds twice, so the result may differ."""
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int)
    coefficient = float(int("".join(map(str, digits))))
    power = float(f"1e{abs(exponent)}")
    return math.copysign(coefficient * power if exponent > 0 else coefficient / power, value)


@dataclass(frozen=True)
class Multiple:
    """A multipleOf as llguidance stores it: `coefficient` / 10 ** `digits`."""

    coefficient: int
    digits: int
    place: Place


def multiple(place: Place) -> Multiple:
    """The multipleOf at a place. Raises SchemaProblem if llguidance would round the value."""
    value = number(place)
    place.require(value > 0, "must be greater than 0")
    place.require(value < _MAX_COEFFICIENT, "must be less than 2^32")
    scaled = float(value)
    digits = 0
    while scaled != int(scaled):
        scaled *= 10
        digits += 1
    is_exact = scaled < _MAX_COEFFICIENT and Fraction(int(scaled), 10**digits) == Fraction(str(value))
    place.require(is_exact, f"{value} cannot be enforced exactly: it has too many digits")
    return Multiple(int(scaled), digits, place)


def check_products(multiples: list[Multiple]) -> None:
    """Raises SchemaProblem if the product of two `multipleOf` values exceeds 32 bits, the limit of llguidance."""
    digits = max((step.digits for step in multiples), default=0)
    coefficients = [step.coefficient * 10 ** (digits - step.digits) for step in multiples]
    for coefficient, step in zip(coefficients, multiples, strict=True):
        step.place.require(
            coefficient * max(coefficients) < _MAX_COEFFICIENT,
            "too large to be combined with other values; use multipleOf below 65536",
        )


def narrow_to_multiples(keywords: dict[str, Any], place: Place, *, fractions: bool) -> dict[str, Any]:
    """If a schema has `multipleOf`, replace its bounds by the first and the last multiple between the bounds.

    `keywords`: the keywords of the schema at `place`, without applicators. `fractions`: the schema also allows numbers
    that are not integers. llguidance may generate all digits of a bound, so a bound must not have more digits than the
    multiples. Raises SchemaProblem.
    """
    bounds = [keyword for keyword in keywords if keyword in SIDES]
    if "multipleOf" not in keywords or not bounds:
        return keywords
    place = place.child("multipleOf")
    step = Fraction(str(keywords["multipleOf"]))
    if not fractions:
        step = Fraction(math.lcm(step.numerator, step.denominator), step.denominator)
    outermost: dict[str, Fraction] = {}
    for keyword in bounds:
        side = SIDES[keyword]
        round_inside = side.round_exclusive if keyword == side.exclusive else side.round
        value = round_inside(Fraction(str(keywords[keyword])) / step) * step
        outermost[side.inclusive] = side.tighter(value, outermost.get(side.inclusive, value))
    narrowed = {keyword: value for keyword, value in keywords.items() if keyword not in SIDES}
    for keyword, value in outermost.items():
        narrowed[keyword] = _exact_multiple(value, place)
    _check_search(narrowed, place)
    return narrowed


def _exact_multiple(value: Fraction, place: Place) -> Number:
    rounded = int(value) if value.denominator == 1 else float(value)
    place.require(Fraction(str(rounded)) == value, "multipleOf next to a bound has too many digits")
    return exact(Place(rounded, "", place.pointer))


def _check_search(keywords: dict[str, Any], place: Place) -> None:
    """Raises SchemaProblem if llguidance, which searches in double precision, finds no multiple between the bounds."""
    minimum = keywords.get("minimum", math.inf)
    maximum = keywords.get("maximum", -math.inf)
    if minimum > maximum:  # no number is between the bounds, or one bound is missing
        return
    step = float(keywords["multipleOf"])
    first = math.ceil(float(minimum) / step) * step
    last = math.floor(float(maximum) / step) * step
    place.require(first <= last, "multipleOf has multiples between the bounds that cannot be generated")
