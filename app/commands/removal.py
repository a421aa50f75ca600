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
        if not click.confirm(f"Delete {_title(plan)} and free {size(plan.frees)}?", err=True):
            say("deleted nothing")
            return 1
    plan.execute()
    if as_json:
        print_json({"deleted": plan.name, "freed": plan.frees, "aliases": plan.aliases}, indent=None)
    else:
        say(f"deleted {_title(plan)}; freed {size(plan.frees)}")
    return 0


def _title(plan: Removal) -> str:
    """The name of the files and the aliases that the plan removes."""
    if not plan.aliases:
        return plan.name
    noun = "alias" if len(plan.aliases) == 1 else "aliases"
    return f"{plan.name} with its {noun} {', '.join(plan.aliases)}"
