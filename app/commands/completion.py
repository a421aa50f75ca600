"""`localllm completion`: the completion script for a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


def completion(command: click.Command, shell: str) -> int:
    """Print the completion script for `shell`."""
    kind = get_completion_class(shell)
    assert kind is not None, f"click does not support {shell}"
    click.echo(kind(command, {}, "localllm", "_LOCALLLM_COMPLETE").source())
    return 0
