"""config.json: its keys, their spellings, the part that describes the text model, and the class that holds them."""
