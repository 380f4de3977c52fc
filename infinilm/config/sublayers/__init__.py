"""The kinds of sublayers in a configuration: a file for each, as in `src/model/sublayers`."""
