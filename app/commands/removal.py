"""Confirms and carries out a planned deletion: the common part of `localllm rm` and `localllm adapters rm`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ..errors import InvalidRequest
from ..sizes import size
from .console import print_json, say

if TYPE_CHECKING:
    from ..store.hub import Removal


def carry_out(plan: Removal, command: str, *, yes: bool, as_json: bool) -> int:
    """Delete the files of a plan, after a confirmation unless `yes`. The result is the exit code.

    `command` is the name of the command in the error message. Raises InvalidRequest if no terminal can confirm.
    """
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidRequest(
                f"{command} needs a terminal to ask for confirmation", hint="add --yes to delete without confirmation"
            )
        if not click.confirm(f"Delete {plan.name} and free {size(plan.frees)}?", err=True):
            say("deleted nothing")
            return 1
    plan.execute()
    if as_json:
        print_json({"deleted": plan.name, "freed": plan.frees}, indent=None)
    else:
        names = " and the alias ".join([plan.name, *plan.aliases])
        say(f"deleted {names}; freed {size(plan.frees)}")
    return 0
