"""The thread that runs the engine for all requests, and the ways in and out of it."""
