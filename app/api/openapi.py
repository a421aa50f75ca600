"""Generates the OpenAPI description from the types of the request and response bodies."""

from __future__ import annotations

from typing import Any

import msgspec

from . import admin, embeddings, ignored, openai, replies
from .anthropic import body as anthropic
from .anthropic import replies as message

TEMPLATE = "#/components/schemas/{name}"
Reply = Any  # a type, or a union of types
BODIES: dict[str, tuple[type[msgspec.Struct], str, dict[str, Reply]]] = {
    "/v1/chat/completions": (
        openai.ChatBody,
        "Answer a conversation",
        {"application/json": replies.ChatCompletion, "text/event-stream": replies.Chunk},
    ),
    "/v1/messages": (
        anthropic.MessagesBody,
        "Answer a conversation (Anthropic's API)",
        {"application/json": message.Message, "text/event-stream": message.Event},
    ),
    "/v1/messages/count_tokens": (
        anthropic.CountBody,
        "Count the tokens of a conversation (Anthropic's API)",
        {"application/json": message.TokenCount},
    ),
    "/v1/completions": (
        openai.CompletionBody,
        "Continue a text",
        {"application/json": replies.TextCompletion, "text/event-stream": replies.TextCompletion},
    ),
    "/v1/embeddings": (
        embeddings.EmbeddingBody,
        "Compute the vectors of texts (embedding models)",
        {"application/json": replies.EmbeddingList},
    ),
    "/v1/tokenize": (openai.TokenizeBody, "Convert a text or a conversation to token ids", {}),
    "/v1/detokenize": (openai.DetokenizeBody, "Convert token ids to text", {}),
    "/v1/load_lora_adapter": (admin.LoadAdapterBody, "Load an adapter (unix socket or API key)", {}),
    "/v1/unload_lora_adapter": (admin.UnloadAdapterBody, "Unload an adapter (unix socket or API key)", {}),
}
READS = {
    "/v1/models": "List the models",
    "/v1/models/{id}": "One of them",
    "/lora-adapters": "List the adapters (unix socket or API key)",
    "/health": "State of the daemon (needs no key)",
    "/metrics": "Metrics for Prometheus",
    "/openapi.json": "This description",
}


IGNORED_HEADER = {
    "description": "The fields of the request that have no effect on the answer of a local model",
    "schema": {"type": "string"},
}


def describe(version: str) -> dict[str, Any]:
    """The OpenAPI document."""
    types: list[Reply] = [replies.ErrorBody, admin.AdapterScale]
    for body, _, responses in BODIES.values():
        types += [body, *responses.values()]
    schemas, components = msgspec.json.schema_components(types, ref_template=TEMPLATE)
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for path, (body, summary, responses) in BODIES.items():
        content = {media: {"schema": schema_of[kind]} for media, kind in responses.items()} or {"application/json": {}}
        request = {"required": True, "content": {"application/json": {"schema": schema_of[body]}}}
        paths[path] = {"post": _operation(summary, content) | {"requestBody": request}}
    for path, summary in READS.items():
        media = "text/plain" if path == "/metrics" else "application/json"
        paths[path] = {"get": _operation(summary, {media: {}})}
    paths["/v1/models/{id}"]["get"]["parameters"] = [
        {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    paths["/health"]["get"]["security"] = []
    scales = {"type": "array", "items": _ref(admin.AdapterScale)}
    paths["/lora-adapters"]["post"] = _operation("Set the default scales of the adapters", {"application/json": {}}) | {
        "requestBody": {"required": True, "content": {"application/json": {"schema": scales}}}
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "localllm", "version": version},
        "paths": paths,
        "x-localllm-ignored": ignored.table(),
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
        "security": [{}, {"bearer": []}, {"header": []}],
    }


def _operation(summary: str, content: dict[str, Any]) -> dict[str, Any]:
    error = {"description": "Error", "content": {"application/json": {"schema": _ref(replies.ErrorBody)}}}
    success = {"description": summary, "content": content, "headers": {ignored.HEADER: IGNORED_HEADER}}
    return {"summary": summary, "responses": {"200": success, "default": error}}


def _ref(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": TEMPLATE.format(name=kind.__name__)}
