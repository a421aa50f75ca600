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
from typing import Any, Literal

from .place import Place

_SAFE_FLOAT = 2**53  # double precision is exact for integers up to this one
_SAFE_INT = 2**63
_MAX_INT = _SAFE_INT - 1
_MAX_FRACTION = 2**62  # llguidance has no regex for a range of fractions beyond it
_MAX_COEFFICIENT = 2**32
_SMALLEST = 1e-30  # inclusive bound for an exclusive 0; a smaller number has many digits: a deep regex

Number = int | float


@dataclass(frozen=True)
class Side:
    """One side of a range of numbers, and how to round a bound to an integer inside the range."""

    inclusive: str  # keyword of the inclusive bound
    exclusive: str  # keyword of the exclusive bound
    outwards: Literal[-1, 1]  # direction out of the range
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
    place.require(
        abs(value) < limit and _is_exact(value),
        f"the number cannot be enforced exactly; the limit is {_SAFE_FLOAT} (2^53)",
    )
    return value


def _is_exact(value: Number) -> bool:
    """True if llguidance parses exactly this number."""
    return abs(value) < _SAFE_INT and float(value) == value == _parsed(float(value))


def bound(schema: Place, side: Side, *, fractions: bool, strict: bool) -> dict[str, Number]:
    """The bound of one side of a schema, from its inclusive and its exclusive keyword.

    `fractions`: the schema also allows numbers that are not integers; then a negative minimum and a positive maximum
    stay exclusive. Any other exclusive bound becomes inclusive: llguidance accepts 0 as a number greater than 0.

    Without `strict`, a bound that llguidance cannot enforce exactly moves out of the range to the nearest one that it
    can; without such a bound, the side has none. Raises SchemaProblem.
    """
    inclusive = schema.child(side.inclusive) if schema.has(side.inclusive) else None
    exclusive = _exclusive(schema, side)
    if not fractions:
        return _integer_bound(inclusive, exclusive, side, strict)
    bounds: dict[str, Number] = {}
    if inclusive is not None:
        bounds |= _fraction_bound(inclusive, side, strict)
    if exclusive is None:
        return bounds
    value = number(exclusive)
    if not strict and not (abs(value) < _SAFE_FLOAT and _is_exact(value)):
        inside = _fraction_bound(exclusive, side, strict).get(side.inclusive)
    else:
        exact(exclusive, limit=_SAFE_FLOAT)
        if value * side.outwards > 0:
            return bounds | {side.exclusive: value}
        inside = _neighbour(value, -side.outwards)
    if inside is None:
        return bounds
    return {side.inclusive: side.tighter(inside, bounds.get(side.inclusive, inside))}


def _exclusive(schema: Place, side: Side) -> Place | None:
    """The exclusive bound of a schema. In draft 4, true makes the inclusive keyword exclusive."""
    limit = schema.value.get(side.exclusive)
    if limit is True:
        limit = schema.value.get(side.inclusive)
    if limit is None or limit is False:
        return None
    return Place(limit, "", f"{schema.pointer}/{side.exclusive}")


def _integer_bound(inclusive: Place | None, exclusive: Place | None, side: Side, strict: bool) -> dict[str, Number]:
    """The inclusive bound of integers. Python computes with all digits of the two bounds."""
    limits: list[tuple[int, Place]] = []
    if inclusive is not None:
        limits.append((side.round(number(inclusive)), inclusive))
    if exclusive is not None:
        limits.append((side.round_exclusive(number(exclusive)), exclusive))
    if not limits:
        return {}
    value, place = side.tighter(limits, key=lambda limit: limit[0])
    if side is _UPPER and value == _MAX_INT:
        return {side.inclusive: value}  # llguidance reads it as 2^63, which means no limit for integers
    return _enforced(Place(value, "", place.pointer), side, strict, end=_SAFE_INT)


def _fraction_bound(place: Place, side: Side, strict: bool) -> dict[str, Number]:
    return _enforced(place, side, strict, end=_MAX_FRACTION)


def _enforced(place: Place, side: Side, strict: bool, *, end: int) -> dict[str, Number]:
    """The inclusive bound at a place. Without `strict`, there is none beyond `end`, which is far out of the range."""
    value = number(place)
    if not strict:
        while abs(value) < _SAFE_INT and not _is_exact(value):
            value = _outside(value, side.outwards)
        if value * side.outwards >= end:
            return {}
    return {side.inclusive: exact(Place(value, "", place.pointer))}


def _outside(value: Number, direction: int) -> Number:
    """The nearest number above (`direction` 1) or below (-1) the value that double precision has."""
    rounded = float(value)
    if (Fraction(rounded) - Fraction(value)) * direction <= 0:
        rounded = math.nextafter(rounded, direction * math.inf)
    return int(rounded) if isinstance(value, int) else rounded


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


def narrow_to_multiples(keywords: dict[str, Any], place: Place, *, fractions: bool, strict: bool) -> dict[str, Any]:
    """If a schema has `multipleOf`, replace its bounds by the first and the last multiple between the bounds. Without
    `strict`, bounds beyond 2^53 are dropped.

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
        if not strict and value * SIDES[keyword].outwards > _SAFE_FLOAT:
            continue
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
