"""The HTTP server: OpenAI's, Anthropic's and llama-server's APIs in front of engines."""
