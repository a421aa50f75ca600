"""Generates the OpenAPI description from the types of the request and response bodies."""

from __future__ import annotations

from typing import Any

import msgspec

from . import admin, embeddings, ignored, llama_server, openai, replies, rerank
from .anthropic import body as anthropic
from .anthropic import replies as message
from .ollama import bodies as ollama
from .ollama import library, vectors
from .ollama.errors import ErrorText
from .responses import body as responses
from .responses import replies as response

TEMPLATE = "#/components/schemas/{name}"
Reply = Any  # a type, or a union of types
AnyObject = dict[str, Any]
METHODS = {"/api/delete": "delete"}  # of the routes with a body that are not POST
TEXTS = ("/", "/metrics")  # routes with a reply in plain text
BODIES: dict[str, tuple[type[msgspec.Struct], str, dict[str, Reply]]] = {
    "/v1/chat/completions": (
        openai.ChatBody,
        "Answer a conversation",
        {"application/json": replies.ChatCompletion, "text/event-stream": replies.Chunk},
    ),
    "/v1/responses": (
        responses.ResponsesBody,
        "Create a response",
        {"application/json": response.Response, "text/event-stream": response.Event},
    ),
    "/v1/responses/input_tokens": (
        responses.InputBody,
        "Count the tokens of an input",
        {"application/json": response.InputTokens},
    ),
    "/v1/messages": (
        anthropic.MessagesBody,
        "Answer a conversation (Anthropic's API)",
        {"application/json": message.MessageReply, "text/event-stream": message.Event},
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
    "/v1/rerank": (rerank.RerankBody, "Rank documents for a query (Jina's and Cohere's forms)", {}),
    "/v2/rerank": (rerank.RerankBody, "Rank documents for a query (Cohere's path)", {}),
    "/v1/score": (rerank.ScoreBody, "Score pairs of query and document", {}),
    "/v1/models/load": (
        admin.LoadBody,
        "Load a model (unix socket or API key)",
        {"application/json": admin.LoadedModel},
    ),
    "/v1/models/unload": (admin.UnloadBody, "Unload a model (unix socket or API key)", {}),
    "/infill": (
        llama_server.InfillBody,
        "Fill the middle between two texts (llama.cpp's API)",
        {"application/json": AnyObject, "text/event-stream": AnyObject},
    ),
    "/apply-template": (llama_server.TemplateBody, "Render the prompt of a conversation (llama.cpp's API)", {}),
    "/api/chat": (
        ollama.OllamaChatBody,
        "Answer a conversation (Ollama's API)",
        {"application/json": AnyObject, "application/x-ndjson": AnyObject},
    ),
    "/api/generate": (
        ollama.GenerateBody,
        "Answer a prompt (Ollama's API)",
        {"application/json": AnyObject, "application/x-ndjson": AnyObject},
    ),
    "/api/embed": (vectors.EmbedBody, "Compute the vectors of texts (Ollama's API)", {}),
    "/api/embeddings": (vectors.EmbeddingsBody, "Compute the vector of a text (Ollama's API)", {}),
    "/api/show": (library.ShowBody, "Show a model (Ollama's API)", {}),
    "/api/pull": (
        library.PullBody,
        "Download a model (Ollama's API; unix socket or API key)",
        {"application/json": AnyObject, "application/x-ndjson": AnyObject},
    ),
    "/api/copy": (library.CopyBody, "Make an alias of a model (Ollama's API; unix socket or API key)", {}),
    "/api/delete": (library.NamedBody, "Delete a model (Ollama's API; unix socket or API key)", {}),
    "/v1/tokenize": (openai.TokenizeBody, "Convert a text or a conversation to token ids", {}),
    "/v1/detokenize": (openai.DetokenizeBody, "Convert token ids to text", {}),
    "/v1/load_lora_adapter": (admin.LoadAdapterBody, "Load an adapter (unix socket or API key)", {}),
    "/v1/unload_lora_adapter": (admin.UnloadAdapterBody, "Unload an adapter (unix socket or API key)", {}),
}
OF_RESPONSES: tuple[tuple[str, str, str, Reply], ...] = (
    ("get", "/v1/responses/{id}", "A stored response, or one that is streamed", response.Response),
    ("delete", "/v1/responses/{id}", "Delete a stored response", response.Deleted),
    ("post", "/v1/responses/{id}/cancel", "End a response that is streamed", response.Response),
    ("get", "/v1/responses/{id}/input_items", "The input items of a stored response", response.ItemList),
)
ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
ITEM_QUERY: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
}
READS = {
    "/v1/models": "List the models",
    "/v1/models/{id}": "One of them",
    "/lora-adapters": "List the adapters (unix socket or API key)",
    "/props": "Facts about a loaded model (llama.cpp's API)",
    "/slots": "The places of a step of a loaded model (llama.cpp's API)",
    "/api/tags": "List the models (Ollama's API)",
    "/api/ps": "List the loaded models (Ollama's API)",
    "/api/version": "Version of the daemon (Ollama's API)",
    "/": "A text by which Ollama's clients find a server",
    "/health": "State of the daemon (needs no key)",
    "/metrics": "Metrics for Prometheus",
    "/openapi.json": "This description",
}


ERRORS: dict[str, type[msgspec.Struct]] = {"/api/": ErrorText, "/v1/messages": message.MessageError}
IGNORED_HEADER = {
    "description": "The fields of the request that have no effect on the answer of a local model",
    "schema": {"type": "string"},
}


def describe(version: str) -> dict[str, Any]:
    """The OpenAPI document."""
    types: list[Reply] = [replies.ErrorBody, *ERRORS.values(), admin.AdapterScale]
    for body, _, kinds in BODIES.values():
        types += [body, *kinds.values()]
    types += [kind for *_, kind in OF_RESPONSES]
    schemas, components = msgspec.json.schema_components(types, ref_template=TEMPLATE)
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for path, (body, summary, kinds) in BODIES.items():
        content = {media: {"schema": schema_of[kind]} for media, kind in kinds.items()} or {"application/json": {}}
        request = {"required": True, "content": {"application/json": {"schema": schema_of[body]}}}
        paths[path] = {METHODS.get(path, "post"): _operation(summary, content, path) | {"requestBody": request}}
    for path, summary in READS.items():
        media = "text/plain" if path in TEXTS else "application/json"
        paths[path] = {"get": _operation(summary, {media: {}}, path)}
    paths["/v1/models/{id}"]["get"]["parameters"] = [ID]
    for method, path, summary, kind in OF_RESPONSES:
        operation = _operation(summary, {"application/json": {"schema": schema_of[kind]}}, path)
        paths.setdefault(path, {})[method] = operation | {"parameters": [ID]}
    paths["/v1/responses/{id}/input_items"]["get"]["parameters"] += [
        {"name": name, "in": "query", "schema": schema} for name, schema in ITEM_QUERY.items()
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


def _operation(summary: str, content: dict[str, Any], path: str = "") -> dict[str, Any]:
    kind = next((kind for start, kind in ERRORS.items() if path.startswith(start)), replies.ErrorBody)
    error = {"description": "Error", "content": {"application/json": {"schema": _ref(kind)}}}
    success = {"description": summary, "content": content, "headers": {ignored.HEADER: IGNORED_HEADER}}
    return {"summary": summary, "responses": {"200": success, "default": error}}


def _ref(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": TEMPLATE.format(name=kind.__name__)}
