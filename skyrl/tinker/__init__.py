"""The Tinker server: an API process (`api`) and the engine process that it supervises (`engine`)."""
