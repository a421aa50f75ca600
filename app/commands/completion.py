"""`localllm completion`: the completion script for a shell."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, get_completion_class

CALL = 'COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD'
JOINED_CALL = 'COMP_WORDS="${words[*]}" COMP_CWORD=$((${#words[@]} - 1))'
REPLY = "COMPREPLY+=($value)"
CUT_REPLY = 'COMPREPLY+=("${value#"$prefix"}")'
# bash splits words at colons, but names of models have colons: qwen3:0.6b. These lines join such words, and remove the
# part before the last colon from the results, because bash replaces only the part after it.
JOIN = r"""
    local -a words=()
    local word prefix='' last
    for word in "${COMP_WORDS[@]:0:COMP_CWORD+1}"; do
        last=$((${#words[@]} - 1))
        if [[ $last -ge 0 && $COMP_WORDBREAKS == *:* && ( $word == :* || ${words[last]} == *: ) ]]; then
            words[last]+=$word
        else
            words+=("$word")
        fi
    done
    word=${words[${#words[@]} - 1]}
    if [[ $COMP_WORDBREAKS == *:* && $word == *:* ]]; then
        prefix=${word%"${word##*:}"}
    fi
"""


def completion(command: click.Command, shell: str) -> int:
    """Print the completion script for `shell`."""
    kind = get_completion_class(shell)
    assert kind is not None, f"click does not support {shell}"
    script = kind(command, {}, "localllm", "_LOCALLLM_COMPLETE").source()
    click.echo(_with_colons(script) if issubclass(kind, BashComplete) else script)
    return 0


def _with_colons(script: str) -> str:
    """click's script for bash, changed so that names with a colon are completed."""
    assert CALL in script, "click has another script for bash"
    assert REPLY in script, "click has another script for bash"
    joined = script.replace("    local response\n", f"    local response\n{JOIN}", 1)
    return joined.replace(CALL, JOINED_CALL, 1).replace(REPLY, CUT_REPLY, 1)
