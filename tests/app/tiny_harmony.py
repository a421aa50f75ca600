"""Writes a byte-level tokenizer with the special tokens of gpt-oss, and a short chat template with its format."""

from __future__ import annotations

import json
from pathlib import Path

from localllm.app.chat.calls.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START

from .tiny_qwen import make_tokenizer

SPECIALS = [RETURN, CONSTRAIN, CHANNEL, START, END, MESSAGE, CALL]

# Like the template of gpt-oss, it renders the first call of a message only, drops the reasoning of earlier turns, and
# ignores system messages but the first one.
TEMPLATE = """\
{%- if messages[0].role in ("system", "developer") %}
{{- '<|start|>developer<|message|>' + messages[0].content + '<|end|>' }}{%- set messages = messages[1:] %}{%- endif %}
{%- for tool in tools or [] %}{{- '// ' + tool.function.description + '\\n' + tool.function.name }}{%- endfor %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
{%- if message.role == "assistant" and "tool_calls" in message %}
{%- set answered = namespace(value=false) %}
{%- for later in messages[loop.index:] %}{%- if later.role == "assistant" and "tool_calls" not in later %}
{%- set answered.value = true %}{%- endif %}{%- endfor %}
{%- if message.content and message.thinking %}{{- raise_exception("both content and thinking") }}{%- endif %}
{%- if message.thinking and not answered.value %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}
{%- set last.name = message.tool_calls[0].function.name %}
{{- '<|start|>assistant to=functions.' + last.name + '<|channel|>commentary json<|message|>' }}
{{- message.tool_calls[0].function.arguments | tojson + '<|call|>' }}
{%- elif message.role == "assistant" and loop.last and not add_generation_prompt %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
{%- elif message.role == "assistant" %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == "tool" %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson + '<|end|>' }}
{%- elif message.role == "user" %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""


def write_harmony_tokenizer(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": RETURN, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
