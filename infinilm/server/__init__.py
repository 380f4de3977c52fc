"""`infinilm serve`: the API of OpenAI over HTTP, and a page to talk to the model."""
