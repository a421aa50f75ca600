"""OpenAI's Responses: their items are converted to a chat, and the pieces of its answer to output items."""
