"""Streams an answer from the API. Start the daemon first: `localllm serve`, or any `localllm chat`."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:11811/v1", api_key="none")

answer = client.chat.completions.create(
    model="guide",
    messages=[{"role": "user", "content": "How do I stop the daemon?"}],
    temperature=0,
    stream=True,
)
for part in answer:
    print(part.choices[0].delta.content or "", end="", flush=True)
print()
