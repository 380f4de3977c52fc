"""A router in front of several servers of one model: `infinilm route`.

`app` has the routes, `forward` sends a request to a replica and, should that fail, to another one, `replicas` knows
which there are, `prefixes` and which of them has computed the beginning of a prompt. It needs
neither the model nor its tokenizer.
"""
