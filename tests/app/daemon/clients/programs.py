"""One program for each client library: asks a question, runs the tools, and prints the last answer.

Usage: programs.py PROGRAM URL
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

MODEL = "test/script"
QUESTION = "How is the weather?"
RESULTS = {"Tromsø 🙂": "snow", "Rome": "sun"}
URL = sys.argv[2]
BASE = {"base_url": f"{URL}/v1", "api_key": "x"}


def get_weather(city: str, days: int) -> str:
    """The weather of a city."""
    return RESULTS[city]


def _agent(model: str) -> Any:
    """An agent of openai-agents. `model`: the name of its class."""
    import agents
    import openai

    agents.set_tracing_disabled(True)
    return agents.Agent(
        name="a",
        instructions="Be brief.",
        tools=[agents.function_tool(get_weather)],
        model=getattr(agents, model)(MODEL, openai.AsyncOpenAI(**BASE)),
        model_settings=agents.ModelSettings(temperature=0),
    )


def agents_responses() -> str:
    from agents import Runner

    agent = _agent("OpenAIResponsesModel")
    first = Runner.run_sync(agent, QUESTION)
    Runner.run_sync(agent, QUESTION, previous_response_id=first.last_response_id)
    return str(Runner.run_sync(agent, [*first.to_input_list(), {"role": "user", "content": "sun"}]).final_output)


def agents_responses_streamed() -> str:
    from agents import Runner

    async def run() -> str:
        result = Runner.run_streamed(_agent("OpenAIResponsesModel"), QUESTION)
        async for _ in result.stream_events():
            pass
        return str(result.final_output)

    return asyncio.run(run())


def agents_chat() -> str:
    from agents import Runner

    return str(Runner.run_sync(_agent("OpenAIChatCompletionsModel"), QUESTION).final_output)


def pydantic_ai_messages() -> str:
    from anthropic import AsyncAnthropic
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    provider = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=URL, api_key="x"))
    return _pydantic_answer(Agent, AnthropicModel(MODEL, provider=provider))


def pydantic_ai_responses() -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return _pydantic_answer(Agent, OpenAIResponsesModel(MODEL, provider=OpenAIProvider(**BASE)))


def _pydantic_answer(agent: Any, model: Any) -> str:
    return str(agent(model, tools=[get_weather], model_settings={"temperature": 0}).run_sync(QUESTION).output)


def langchain_messages() -> str:
    from langchain_anthropic import ChatAnthropic

    return _langchain_answer(ChatAnthropic(model=MODEL, base_url=URL, api_key="x", temperature=0))


def langchain_responses() -> str:
    from langchain_openai import ChatOpenAI

    return _langchain_answer(ChatOpenAI(model=MODEL, temperature=0, use_responses_api=True, **BASE))


def _langchain_answer(model: Any) -> str:
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = model.bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(QUESTION)]
    messages.append(bound.invoke(messages))
    for call in messages[-1].tool_calls:
        messages.append(ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"]))
    answer = bound.invoke(messages).text
    assert "".join(chunk.text for chunk in bound.stream(messages)) == answer
    return str(answer)


if __name__ == "__main__":
    print(globals()[sys.argv[1]]())
