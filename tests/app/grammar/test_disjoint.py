"""Schemas that no value can match at the same time."""

from __future__ import annotations

from typing import Any

import pytest

from localllm.app.grammar.disjoint import are_disjoint


def tagged(tag: Any, required: Any = ("kind",), **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": tag}, "required": [*required]} | more


A, B = {"const": "a"}, {"const": "b"}


@pytest.mark.parametrize(
    ("one", "other", "disjoint"),
    [
        (False, {}, True),
        (False, True, True),
        (True, {}, False),
        ({}, {}, False),
        (None, {}, False),
        ({"type": "string"}, {"type": "object"}, True),
        ({"type": "string"}, {}, False),
        ({"type": "integer"}, {"type": "number"}, False),
        ({"type": ["integer", "null"]}, {"type": ["string", "number"]}, False),
        ({"type": ["integer", "null"]}, {"type": ["string", "array"]}, True),
        ({"type": ["boolean", 3]}, {"type": "null"}, True),
        ({"type": 3}, {"type": "null"}, True),
        (A, B, True),
        (A, A, False),
        ({"enum": ["a", "b"]}, {"enum": ["c"]}, True),
        ({"enum": ["a", "b"]}, {"enum": ["b", "c"]}, False),
        ({"enum": ["a", "b"]}, B, False),
        ({"enum": ["a", 1]}, {"enum": ["c"]}, False),
        ({"enum": []}, {"enum": ["c"]}, False),
        ({"enum": "a"}, {"enum": ["c"]}, False),
        ({"const": 1}, {"const": 2}, False),
        ({"const": "a", "enum": ["b"]}, {"enum": ["b"]}, True),
        (tagged(A), tagged(B), True),
        (tagged({"enum": ["a", "c"]}), tagged(B), True),
        (tagged(A), tagged(A), False),
        (tagged(A), tagged({}), False),
        (tagged(A), tagged(B, required=()), False),
        (tagged(A, required=()), tagged(B), False),
        (tagged(A, required=(3,)), tagged(B, required=(3,)), False),
        (tagged(A, required=("kind", "other")), tagged(B, required=("kind", "other")), True),
        (tagged(A) | {"required": "kind"}, tagged(B), False),
        (tagged(A) | {"properties": ["kind"]}, tagged(B), False),
        (tagged(True), tagged(B), False),
        # a value that is not an object matches both
        (tagged(A, type=["object", "null"]), tagged(B), False),
        (tagged(A, type=["object", "null"]), tagged(B, type=["object", "null"]), False),
        ({"properties": {"kind": A}, "required": ["kind"]}, tagged(B), False),
    ],
)
def test_are_disjoint_is_symmetric_and_true_only_with_a_proof(one: Any, other: Any, disjoint: bool) -> None:
    assert are_disjoint(one, other) is disjoint
    assert are_disjoint(other, one) is disjoint
