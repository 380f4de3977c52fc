"""Vocabularies in the forms that models are published with, made into the content of a tokenizer.json.

The tokenizers library runs every vocabulary, and it reads tokenizer.json. Each other form has a module here that says
the same in that form: SentencePiece's tokenizer.model, tiktoken's lists of ranks, Mistral's tekken.json, and the pair
vocab.json and merges.txt. GGUF files (`infinilm.gguf.tokenizer`) use the same parts.
"""
