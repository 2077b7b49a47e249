"""May this server be destroyed? The answer, with reasons and fixes."""
