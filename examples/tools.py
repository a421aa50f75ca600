"""Lets a model call a function. The arguments fit the schema, because the daemon constrains the call."""

import json
import shutil

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:11811/v1", api_key="none")
schema = {
    "type": "object",
    "properties": {"folder": {"enum": ["/", "/tmp"]}},
    "required": ["folder"],
    "additionalProperties": False,
}
tool = {"type": "function", "function": {"name": "free_disk_space", "parameters": schema, "strict": True}}
messages = [{"role": "user", "content": "How much disk space is free in /tmp?"}]

reply = client.chat.completions.create(model="guide", messages=messages, tools=[tool], tool_choice="required")
call = reply.choices[0].message.tool_calls[0]
folder = json.loads(call.function.arguments)["folder"]
print(f"{call.function.name}({folder!r})")

messages.append(reply.choices[0].message)
messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{shutil.disk_usage(folder).free} bytes"})
reply = client.chat.completions.create(model="guide", messages=messages, tools=[tool])
print(reply.choices[0].message.content)
