"""The numbers of a JSON schema, in the range in which llguidance enforces them exactly.

A number has at most 15 digits, so that it is a double of its own. A bound that excludes only numbers beyond 2^53, such
as those of 64-bit integers, counts as no bound: clients read such numbers as doubles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Context, Decimal
from fractions import Fraction

from .place import Place

_LARGEST = 2**53
_SMALLEST = 1e-15
_FIFTEEN_DIGITS = Context(prec=15)
_MAX_STEP = 2**16  # llguidance multiplies two multipleOf of a value in 32 bits
_INEXACT = "the number cannot be enforced exactly: more than 15 digits, closer to 0 than 1e-15, or beyond 2^53"

# Inclusive keyword, exclusive keyword, direction into the range.
_SIDES = (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1))
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")

Number = int | float


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


def exact(place: Place) -> Number:
    """The number at a place. Raises SchemaProblem if llguidance rounds it."""
    value = number(place)
    is_exact = value == int(value) or (abs(value) >= _SMALLEST and float(f"{value:.15g}") == value)
    place.require(
        abs(value) <= _LARGEST and is_exact,
        _INEXACT,
    )
    return value


def bounds(schema: Place, *, integers: bool) -> dict[str, Number]:
    """The bounds of a schema. A bound that llguidance reads differently, such as one between two multiples, becomes the
    first number inside. `integers`: only those. Raises SchemaProblem."""
    multiple = schema.child("multipleOf") if schema.has("multipleOf") else None
    step = Fraction(str(_step(multiple))) if multiple else None
    if integers:
        step = Fraction(step.numerator if step else 1)
    result = _side(schema, *_SIDES[0], step) | _side(schema, *_SIDES[1], step)
    if multiple and {"minimum", "maximum"} <= result.keys():
        _check_search(multiple, result["minimum"], result["maximum"])
    return result


def _side(schema: Place, inclusive: str, exclusive: str, inwards: int, step: Fraction | None) -> dict[str, Number]:
    """The bounds of one side. `inwards`: the direction into the range. `step`: the numbers are its multiples."""
    result: dict[str, Number] = {}
    limits = [_inside(place, inwards, step, 0) for place in _effective(schema, inclusive, inwards)]
    for place in _effective(schema, exclusive, inwards):
        if step is None and place.value * inwards < 0:  # llguidance reads only these exclusive bounds correctly
            result[exclusive] = exact(place)
        else:
            limits.append(_inside(place, inwards, step, 1))
    if limits:
        limit = max(limits, key=lambda value: value * inwards)
        result[inclusive] = exact(Place(limit, f"{schema.pointer}/{inclusive}"))
    return result


def _effective(schema: Place, keyword: str, inwards: int) -> list[Place]:
    """The place of a bound; none if the schema lacks it, or if it excludes only numbers beyond 2^53."""
    places = [schema.child(keyword)] if schema.has(keyword) else []
    return [place for place in places if number(place) * inwards > -_LARGEST]


def _inside(place: Place, inwards: int, step: Fraction | None, excluded: int) -> Number:
    """The first number inside a bound. `excluded`: 1 if the bound is outside."""
    value = exact(place)
    if step:
        steps = Fraction(str(value)) / step * inwards
        inside = (math.floor(steps) + 1 if excluded else math.ceil(steps)) * inwards * step
        result = int(inside) if inside.denominator == 1 else float(inside)
        place.require(Fraction(str(result)) == inside, _INEXACT)
        return result
    return inwards * _next(abs(value)) if excluded else value


def _next(value: Number) -> Number:
    """The next larger number of at most 15 digits, or the next integer if that has more."""
    larger = float(Decimal(str(value)).next_plus(_FIFTEEN_DIGITS))
    return max(_SMALLEST, min(value + 1, larger))


def _check_search(multiple: Place, minimum: Number, maximum: Number) -> None:
    """Raises SchemaProblem if llguidance, which searches in double precision, finds no multiple between the bounds."""
    step = float(multiple.value)
    is_found = math.ceil(minimum / step) * step <= math.floor(maximum / step) * step
    multiple.require(is_found or minimum > maximum, "has multiples between the bounds that cannot be generated")


def check_multiples(steps: Sequence[Place]) -> None:
    """Raises SchemaProblem if llguidance would round a multipleOf, or overflow when it combines two of them."""
    sizes = [_decimal(step) for step in steps]
    digits = max((places for _, places in sizes), default=0)
    for (coefficient, places), step in zip(sizes, steps, strict=True):
        step.require(
            coefficient * 10 ** (digits - places) < _MAX_STEP,
            f"too large: without its decimal point, and with the {digits} decimal places that a multipleOf of the "
            f"schema has, it must be less than {_MAX_STEP}",
        )


def _step(place: Place) -> Number:
    value = exact(place)
    place.require(value > 0, "must be greater than 0")
    return value


def _decimal(step: Place) -> tuple[int, int]:
    """(coefficient, decimal places) of a multipleOf, as llguidance stores it."""
    value = _step(step)
    scaled, places = float(value), 0
    while scaled != int(scaled):
        scaled, places = scaled * 10, places + 1
    step.require(
        Fraction(int(scaled), 10**places) == Fraction(str(value)),
        f"{value} cannot be enforced exactly: too many digits",
    )
    return int(scaled), places
